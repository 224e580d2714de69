"""vLLM's names for what frame has: arguments, environment variables and modules, for programs that change one word.

Knows names and values only. Nothing else of frame speaks vLLM's language.
"""
