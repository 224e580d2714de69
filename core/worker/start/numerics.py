"""What a KV block holds besides its tokens, as two texts: `KVLayout.model`, and each worker's part of its `numerics`.

Blocks outlive an engine (on a disk, in another engine). Engines of one `model` compute the same blocks but for
rounding; engines of equal `numerics` compute equal bits and lay them out alike. Knows no block and no hash of tokens.
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
#: What config.json says of itself, not of the model.
_IRRELEVANT = ("_name_or_path", "transformers_version")


def block_numerics(layout: KVLayout, backends: Iterable[CacheBackend], facts: Mapping[str, Any]) -> str:
    """A digest of how blocks are divided and laid out here; `facts` are plain values that decide bits, too."""
    formats = []
    for backend in backends:
        block = backend.kv_format(backend.spec)
        formats.append([type(backend).__qualname__, list(block.shape), list(block.order), str(block.dtype)])
    return hashlib.sha256(encode([sorted(facts.items()), layout.groups, formats])).hexdigest()


def model_digest(hf: Mapping[str, Any], loader: WeightLoader, dtypes: Sequence[torch.dtype]) -> str:
    """A digest of config.json, of the element types that the model computes and caches in, and of the weights.

    Of each tensor of the checkpoint 16 elements count: training moves nearly every element of the tensors it touches.
    They are read whole, as a loader that maps files has them for nothing. Of weights that the loader makes up, its
    seed counts.
    """
    config = {name: value for name, value in hf.items() if name not in _IRRELEVANT}
    made_up = [] if loader.complete else [type(loader).__qualname__, loader.setup.seed]
    names = [json.dumps(config, sort_keys=True, default=str), [str(dtype) for dtype in dtypes], made_up]
    tensors = sorted((_sampled(tensor) for tensor in loader.tensors()), key=lambda sample: sample[0])
    return hashlib.sha256(encode([names, tensors])).hexdigest()


def _sampled(tensor: LazyTensor) -> tuple[str, str, tuple[int, ...], bytes]:
    flat = tensor.read().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().view(torch.uint8)
    return tensor.name, str(tensor.dtype), tuple(tensor.shape), sample.numpy().tobytes()
