"""What an engine tells others of its prefix cache: which blocks it holds now, as events in vLLM's form over ZMQ."""
