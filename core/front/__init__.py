"""The text side: templates, tokenizers, stop strings, chat turns, and the record of each request."""
