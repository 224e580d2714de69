"""Kernels compiled ahead of the requests that launch them, by processes that hold no device."""
