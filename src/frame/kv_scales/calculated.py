"""Scales of a KV cache of 8-bit floats that follow from the first tokens that are served (`calculate_kv_scales`).

A layer has them in a tensor, which kernels and recorded steps read, so that they are set in place. Layers measure the
first step that has tokens of requests, before it stores any: no block was ever written with another scale. Until all
layers have measured, steps run launch by launch, since a recorded step calls no layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frame.core.interfaces.platform_steps import EagerGraphs, Part, Result, StepShape

if TYPE_CHECKING:
    from frame.core.layers.attention import Attention
    from frame.core.worker.device import Device

#: The cache holds numbers that are at least so many times as large as the first tokens' largest.
ROOM = 2
NOT_DETERMINISTIC = "the scales of its KV cache follow from the first request (calculate_kv_scales)"


def calculate(layers: Iterable[Any]) -> None:
    """Has layers keep their scales in tensors. Called when weights are loaded, before any step.

    Raises `ValueError` where a checkpoint has scales, and where no layer has a cache of 8-bit floats.
    """
    scaled = _scaled(layers)
    if not scaled:
        raise ValueError(
            "calculate_kv_scales: no layer keeps keys and values in a cache of 8-bit floats; "
            "set kv_cache_dtype to fp8_e4m3"
        )
    for layer in scaled:
        scales = layer.kv_scales
        if scales is not None and set(scales.flatten().tolist()) != {1.0}:
            raise ValueError(f"calculate_kv_scales: the checkpoint has scales for {layer.name}; leave the setting out")
        if scales is not None:
            layer.params = replace(layer.params, key_scale=scales[0], value_scale=scales[1])


def measure(layer: Attention, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Sets the scales of `layer` by keys and values [T, Hk, D] of this step, unless no token has a slot.

    They are equal on all tensor ranks, and powers of two, by which floats are multiplied without rounding. `slots` [T]
    are negative for padding.
    """
    scales, real = layer.kv_scales, (slots >= 0)[:, None, None]
    if scales is None:
        return
    own = torch.stack([torch.where(real, x.abs(), -1).amax().float() for x in (key, value)])
    largest = layer.group.all_gather(own[None], 0).amax(0).tolist()
    if max(largest) < 0:
        return
    for scale, most in zip(scales, largest, strict=True):
        usable = math.isfinite(most) and most > 0
        exponent = math.frexp(most * ROOM / torch.finfo(layer.spec.kv_dtype).max)[1] if usable else 0
        scale.fill_(2.0**exponent)
    layer.measures = False


class FirstSteps(EagerGraphs):
    """The graphs of a device until all of `layers` have measured, which begins now; then it has its own again."""

    def __init__(self, device: Device, layers: Iterable[Any]) -> None:
        self._device, self._graphs = device, device.graphs
        self._layers = _scaled(layers)
        for layer in self._layers:
            layer.measures = True
        device.graphs = self

    def run(self, shape: StepShape, part: Part, work: Callable[[], Result], kind: str = "") -> Result:
        if part == "writes" and not any(layer.measures for layer in self._layers):  # a step begins
            self._device.graphs = self._graphs
            return self._graphs.run(shape, part, work, kind)
        return work()

    def drop(self) -> None:
        self._graphs.drop()


def _scaled(layers: Iterable[Any]) -> list[Attention]:
    """Those that have scales."""
    return [layer for layer in layers if getattr(layer, "kv_scales", None) is not None]
