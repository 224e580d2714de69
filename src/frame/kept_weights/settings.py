"""Settings of weights that outlive their engine."""

from __future__ import annotations

from frame.core.config.section import Section, setting


class KeptWeightsConfig(Section):
    """Weights that a server keeps for its next engine."""

    keep_weights: bool = setting(
        False,
        "Keep the weights on the device when the engine dies, so that the next engine need not read them; the server "
        "gives the memory back when it ends, and when they are dropped or replaced.",
    )
    weight_keeper: str = setting(
        "", "Socket of the process that keeps weights; a server with keep_weights sets it for its engines."
    )
