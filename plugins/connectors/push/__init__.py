"""Prompt blocks that a prefill engine sends to a decode engine while it computes."""
