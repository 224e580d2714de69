"""Weights of some layers in host memory, copied to the device in every step ahead of the layers that need them."""
