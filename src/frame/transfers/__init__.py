"""The calls of KV connectors on the engine's side, and what the reports of several workers amount to."""
