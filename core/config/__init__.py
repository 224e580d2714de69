"""Configuration: the tree of settings, its sources (flags, YAML, keyword arguments), and a checkpoint's facts."""
