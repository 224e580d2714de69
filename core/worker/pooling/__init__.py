"""Pooling models: hidden states of a step to the rows of each prompt.

May write the pooling state of slots. Touches no sampling.
"""
