"""Prompt blocks in a folder that engines share."""
