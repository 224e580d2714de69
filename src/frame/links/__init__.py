"""Connections between machines that serve one model, what must be equal on all of them, and what workers are told."""
