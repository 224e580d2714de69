"""Kernels in C for what a processor does in steps of few tokens, compiled for it when an engine starts."""
