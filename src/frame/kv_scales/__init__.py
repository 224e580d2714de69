"""Scales of a KV cache of 8-bit floats that are tensors: applied for backends that take numbers, and calculated."""
