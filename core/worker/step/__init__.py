"""One step on the device: its inputs, the forward pass, drafts, and the handle of its result.

May write the request state and the buffers of a step. Touches no sampling parameter and no weights.
"""
