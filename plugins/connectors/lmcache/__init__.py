"""Prompt blocks at an LMCache server of this machine."""
