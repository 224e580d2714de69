"""Which requests enter the next step, with how many tokens and in which slots.

May change requests, the queue and the plan of a step; asks `cache` for blocks. Touches no grammar and no process.
"""
