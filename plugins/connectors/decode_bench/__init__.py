"""Prompts that count as loaded and are not computed, for load tests of decodes."""
