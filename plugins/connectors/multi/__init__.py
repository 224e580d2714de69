"""Several connectors as one."""
