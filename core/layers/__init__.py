"""Layers that models are put together from. They know shards and weights, and no request; `frame.layers` has them."""
