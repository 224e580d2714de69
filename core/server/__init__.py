"""The HTTP host: ingress, limits, metrics, and what endpoints are given. Starts and watches no process."""
