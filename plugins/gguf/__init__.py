"""GGUF: reads its files, describes them as a checkpoint folder, and computes with their blocks of weights."""
