"""`frame bench`: measures an engine or any OpenAI-compatible server. One file a subcommand."""
