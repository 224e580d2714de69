"""Prompt blocks that decode engines read from a prefill engine's memory, through NIXL."""
