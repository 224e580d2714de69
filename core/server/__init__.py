"""The HTTP host: ingress, limits, metrics, and the services that endpoints get. Starts and watches no process."""
