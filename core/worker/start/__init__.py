"""From a checkpoint to a worker that can serve: weights, attention backends, KV memory, CUDA graphs, warm-up.

Runs once, before the first request. Touches no request.
"""
