"""The server: engine process, its channel and supervision, and the HTTP host. Knows no model and no kernel."""
