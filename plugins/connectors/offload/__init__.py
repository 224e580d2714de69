"""Prompt blocks in this machine's memory, and on a disk behind it."""
