"""Batches of requests: the routes `/v1/files` and `/v1/batches`, and `frame run-batch`. Both run lines the same way.

The providers are listed in `plugins/endpoints` and `plugins/commands`.
"""
