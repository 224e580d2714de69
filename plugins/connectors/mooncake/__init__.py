"""Prompt blocks that Mooncake's transfer engine writes to the decode engine."""
