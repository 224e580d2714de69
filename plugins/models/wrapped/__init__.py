"""Any architecture that has no file of its own: transformers' class, with frame's attention, layers and weights.

`library` finds the class, `trial` learns what it asks of attention, `replacing` puts frame's parts in, `names` loads
its weights. `decoder`, `encoder` and `recomputed` are the models. Nothing here knows an architecture by name, but for
two that `recomputed` refuses.
"""
