"""The plugin host: finds the plugins that packages offer, chooses them by name, and builds them."""
