"""The HTTP host: ingress, limits, metrics, and the services that endpoints get.

Starts and watches no process. Knows no route but those that the ingress lists as open; all others come from plugins.
"""
