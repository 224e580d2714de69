"""How an engine is divided over workers: their process groups, and where they find one another."""
