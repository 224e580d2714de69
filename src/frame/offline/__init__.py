"""Inference in the caller's process: `LLM`, `LLMEngine` and beam search, over core's front and engine."""
