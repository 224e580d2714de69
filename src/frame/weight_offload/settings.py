"""Settings of weights that are kept in host memory."""

from __future__ import annotations

from frame.core.config.section import Section, setting


class WeightOffloadConfig(Section):
    """Weights in host memory, for models that are larger than the device."""

    cpu_offload_gb: float = setting(
        0.0,
        "GiB of weights of each device that are kept in host memory, and copied to the device in every step ahead of "
        "the layers that need them: a model may be larger than the device, and runs at the speed of these copies.",
        ge=0,
        le=1 << 20,
    )
    cpu_offload_ahead: int = setting(
        2,
        "Layers that are copied ahead of the one that computes, of those that cpu_offload_gb keeps in host memory; "
        "each takes its memory on the device.",
        ge=1,
        le=64,
    )
