"""CUDA graphs of whole steps and of the pieces between layers that need Python."""
