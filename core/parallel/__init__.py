"""How an engine is divided over workers: their process groups, and which divisions a model allows."""
