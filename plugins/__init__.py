"""The default plugins: one folder a kind, each with its hookimpls. Registered through the entry point `defaults`."""
