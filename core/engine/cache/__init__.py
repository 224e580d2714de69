"""Which blocks of the KV cache hold what: the pool, hashes, prefix hits, transfers to other stores.

May change the block tables of requests. Knows block ids, not their bytes, and plans no step.
"""
