"""Weights that outlive their engine: a server keeps the memory in which they lie, and its next engine finds them."""
