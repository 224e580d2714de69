"""The contract: what plugins implement and what crosses between the parts of frame; `frame.interfaces` for plugins."""
