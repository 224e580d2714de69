"""One NVIDIA GPU: its ops, queues, memory, CUDA graphs, and the compilation of its kernels.

Importing it imports no torch.
"""
