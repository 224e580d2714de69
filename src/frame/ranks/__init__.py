"""Several engines of one model as one: which of them gets a request, and what they say of themselves together."""
