"""Grammars of requests: tried, compiled and followed token by token, beside the step loop.

May hold requests back and write masks. Touches no block and no queue.
"""
