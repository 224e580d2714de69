"""The engine processes of a server, whose number may change while it serves. Imports no torch."""
