"""Batches of requests: the routes `/v1/files` and `/v1/batches`, and `frame run-batch`. Both run the same lines.

`plugins/endpoints` and `plugins/commands` offer them.
"""
