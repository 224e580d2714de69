"""Every launch of kernels that is compiled ahead of time, by name, and the process that compiles them.

Pretending a device changes globals of torch and Triton, so it is done in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

from .ahead import Build, Chip

#: Attention layers that stand for all on chips before Hopper.
_PLAIN_LAYERS = ("usual", "head of 256", "float32", "e5m2 cache", "window, soft cap, sinks")


@cache
def launches() -> dict[str, Callable[[], None]]:
    """By name: what makes the launches; imports every kernel."""
    from .attention_launches import LAYERS, attention_launches, hopper_launches
    from .latent_launches import latent_launches
    from .layer_launches import (
        coded_launches,
        expert_launches,
        fragment_launches,
        hopper_experts,
        hopper_products,
        nibble_launches,
        product_launches,
        quantized_launches,
        rows_launches,
        small_launches,
    )
    from .sampling_launches import runner_launches, sampling_launches
    from .state_launches import state_launches

    attention = [attention_launches(name) for name in LAYERS]
    layers = [
        product_launches(),
        quantized_launches(),
        fragment_launches(),
        nibble_launches(),
        rows_launches(),
        expert_launches(),
        coded_launches(),
        hopper_experts(),
        small_launches(),
    ]
    tables = [
        *attention,
        latent_launches(),
        hopper_launches(),
        hopper_products(),
        *layers,
        runner_launches(),
        sampling_launches(),
        state_launches(),
    ]
    return {name: launch for table in tables for name, launch in table.items()}


def plain_launches() -> list[str]:
    """The names of those of them that every chip from compute capability 8.0 on must be able to run."""
    from .attention_launches import LAYERS, attention_launches, hopper_launches
    from .latent_launches import latent_launches
    from .layer_launches import (
        coded_launches,
        fragment_launches,
        hopper_experts,
        hopper_products,
        quantized_launches,
        rows_launches,
    )

    left_out = {name for layer in LAYERS if layer not in _PLAIN_LAYERS for name in attention_launches(layer)}
    left_out |= {*hopper_launches(), *hopper_products(), *hopper_experts(), *rows_launches(), *fragment_launches()}
    left_out |= {name for name in quantized_launches() if name.startswith("fp8")}
    left_out |= {name for name in latent_launches() if "e4m3" in name}
    left_out |= {name for name in coded_launches() if "fp8" in name or "nvfp4" in name}
    return [name for name in launches() if name not in left_out]


def build(chip: Chip, name: str) -> list[Build]:
    """What the launches of that name compile to."""
    from .ahead import compile_all

    return compile_all(chip, launches()[name])


def kernels_launched(chip: Chip) -> set[str]:
    """The names of all kernels that the launches here make; compiles nothing."""
    from .ahead import launched

    return {name for launch in launches().values() for name in launched(chip, launch)}


def compiler() -> ProcessPoolExecutor:
    """A process for `build`."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_one_thread)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
