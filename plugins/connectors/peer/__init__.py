"""Prompt blocks that other engines hold."""
