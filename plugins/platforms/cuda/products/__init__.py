"""Products of rows with a weight: the kernels that can do them, the times that decide between them, the library's.

May touch torch, kernels and files in Triton's cache; knows no layer, no step and no platform.
"""
