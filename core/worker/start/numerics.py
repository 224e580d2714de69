"""What decides the bits in a KV block besides its tokens, as one text: `KVLayout.numerics`.

Blocks outlive an engine (on a disk, in another engine), so two engines must share blocks exactly when they would
compute the same ones and lay them out alike. Knows no block and no hash of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...interfaces.attention import AttentionBackend
from ...interfaces.kv import KVLayout
from ...interfaces.wire import encode

SAMPLES = 16
TABLE_ROWS = 8


def block_numerics(
    model: nn.Module, layout: KVLayout, backends: Sequence[AttentionBackend], facts: Mapping[str, Any]
) -> str:
    """A digest of the weights, the element types, and how each group's backend lays out a block.

    `facts` are plain values that decide bits too: architecture, dtype, platform, deterministic mode, …
    """
    groups = [
        [
            group.spec,
            list(group.layers),
            *_format(backend),
            type(backend).__qualname__,
        ]
        for group, backend in zip(layout.groups, backends, strict=True)
    ]
    return hashlib.sha256(encode([sorted(facts.items()), groups, fingerprint(model)])).hexdigest()


def _format(backend: AttentionBackend) -> list[Any]:
    block = backend.kv_format(backend.spec)
    return [list(block.shape), list(block.order), str(block.dtype)]


def fingerprint(model: nn.Module) -> bytes:
    """A digest of a few elements of every weight and of the first rows of every table (rotary frequencies).

    Training moves nearly every element of the tensors it touches, so a sample tells checkpoints apart without reading
    them again. Tables are cut because their length follows `max_model_len`, which changes no block.
    """
    names, parts = [], []
    for name, kind, sample in _samples(model):
        names.append([name, kind])
        parts.append(sample.contiguous().view(torch.uint8))
    data = torch.cat(parts).cpu().numpy().tobytes() if parts else b""
    return hashlib.sha256(encode(names) + data).digest()


def _samples(model: nn.Module) -> Iterator[tuple[str, list[Any], Tensor]]:
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        if flat.numel():
            step = max(1, flat.numel() // SAMPLES)
            yield name, [str(parameter.dtype), list(parameter.shape)], flat[::step][:SAMPLES]
    for name, buffer in model.named_buffers():
        rows = buffer.detach()[:TABLE_ROWS] if buffer.dim() else buffer.detach()
        if rows.numel():
            yield name, [str(buffer.dtype), list(buffer.shape[1:])], rows.reshape(-1)
