"""From logits to tokens: parameters by slot, processors, penalties, draws, log-probabilities.

May write the sampling state of slots. Touches no KV cache and no weights.
"""
