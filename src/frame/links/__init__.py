"""Connections between machines that serve one model, and what must be equal on all of them."""
