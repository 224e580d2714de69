"""The plugin host: finds what packages offer, chooses by name and builds it. Knows no plugin."""
