"""`frame eplb`: what the balancing of experts would do, without a model and without devices."""
