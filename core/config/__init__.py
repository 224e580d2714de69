"""Configuration: the tree, its sources (flags, YAML, keyword arguments) and the facts of a checkpoint folder."""
