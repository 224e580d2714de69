"""Which requests broke a step, and which may be computed until that is known.

Reads the requests of launched steps. Touches no block and no device.
"""
