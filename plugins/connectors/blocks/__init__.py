"""What connectors share that keep blocks of prompts: both sides, memory, copies and connections."""
