"""One device: its memory, its request state, and the step. Knows no scheduling and no text."""
