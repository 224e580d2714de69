"""How the model of an engine is divided over ranks: which divisions are possible, and what each rank then holds."""
