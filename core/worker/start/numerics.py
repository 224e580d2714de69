"""Two digests that say whether engines may share KV blocks: `KVLayout.model`, and a worker's part of its `numerics`.

Blocks outlive an engine (on a disk, in another engine). Engines with the same `model` digest compute the same blocks
up to rounding; engines with the same `numerics` compute the same bits and lay them out alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...interfaces.attention import CacheBackend
from ...interfaces.kv import KVLayout
from ...interfaces.loader import LazyTensor, WeightLoader
from ...interfaces.wire import encode

SAMPLES = 16
#: Fields of config.json that do not change what the model computes.
_IRRELEVANT = ("_name_or_path", "transformers_version")


def block_numerics(layout: KVLayout, backends: Iterable[CacheBackend], facts: Mapping[str, Any]) -> str:
    """A digest of the KV groups, the backends' block formats, and `facts`: other plain values that decide bits."""
    formats = []
    for backend in backends:
        block = backend.kv_format(backend.spec)
        formats.append([type(backend).__qualname__, list(block.shape), list(block.order), str(block.dtype)])
    return hashlib.sha256(encode([sorted(facts.items()), layout.groups, formats])).hexdigest()


def model_digest(
    hf: Mapping[str, Any], loader: WeightLoader, dtypes: Sequence[torch.dtype], quantization: str = ""
) -> str:
    """A digest of config.json, of the element types that the model computes and caches in, and of the weights.

    The digest takes up to 16 elements of one row of each checkpoint tensor, and reads no other: training changes nearly
    every element, and each of several workers reads its own part of a tensor only. For weights that a loader makes up
    it takes the loader's seed. `quantization` is what was made of weights that were not quantised.
    """
    config = {name: value for name, value in hf.items() if name not in _IRRELEVANT}
    made_up = [] if loader.complete else [type(loader).__qualname__, loader.setup.seed]
    kinds = [str(dtype) for dtype in dtypes] + [quantization] * bool(quantization)
    names = [json.dumps(config, sort_keys=True, default=str), kinds, made_up]
    tensors = sorted((_sampled(tensor) for tensor in loader.tensors()), key=lambda sample: sample[0])
    return hashlib.sha256(encode([names, tensors])).hexdigest()


def _sampled(tensor: LazyTensor) -> tuple[str, str, tuple[int, ...], bytes]:
    row = tuple(slice(size // 2, size // 2 + 1) for size in tensor.shape[:-1])
    whole = not tensor.shape or 0 in tensor.shape
    flat = tensor.read(() if whole else (*row, slice(0, tensor.shape[-1]))).reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().view(torch.uint8)
    return tensor.name, str(tensor.dtype), tuple(tensor.shape), sample.numpy().tobytes()
