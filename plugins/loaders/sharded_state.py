"""The weights of each rank as they are once loaded: written by `LLM.save_sharded_state`, read without any change.

A file of facts beside them says for which division, quantisation and type they were stored, and what tensors the
checkpoint had, as formats of quantised weights ask for these.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from frame.interfaces import LazyTensor, Model, WeightLoader
from frame.weight_offload.null import moves_weights

from .safetensors import SafetensorsLoader

FACTS = "sharded_state.json"
PATTERN, MAX_SIZE = "model-rank-{rank}-part-{part}.safetensors", 5 << 30
#: Files of a checkpoint that are copied: configuration, tokenizer and templates.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_SAMPLES = 64


class NotedTensor(LazyTensor):
    """A tensor of the checkpoint that was stored; what is read stands for its values and is not them."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], digest: str) -> None:
        self.name, self.shape, self.dtype = name, shape, getattr(torch, dtype)
        self._digest = digest

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        del index
        return torch.frombuffer(bytearray.fromhex(self._digest), dtype=torch.uint8)


class ShardedStateLoader(WeightLoader):
    """Files `model-rank-R-part-P.safetensors` and the facts about them."""

    def supports(self, folder: Path) -> str | None:
        return None if (folder / FACTS).is_file() else f"there is no {FACTS}, which LLM.save_sharded_state writes"

    def tensors(self) -> Iterator[LazyTensor]:
        """Those of the checkpoint, for what must know their names, types and shapes."""
        for name, (dtype, shape, digest) in self._facts()["tensors"].items():
            yield NotedTensor(name, dtype, tuple(shape), digest)

    def restore(self, model: Model, fill: Callable[[Any], None]) -> int | None:
        _require_here(model)
        facts, kind = self._facts(), type(model).__name__
        self._require_alike(facts["share"], model.share)
        wanted = state_of(model)
        found = {tensor.name: tensor for tensor in self._parts(facts, model.share["rank"])}
        if odd := sorted(wanted.keys() ^ found.keys()):
            raise ValueError(f"{self.folder} does not fit {kind}: only one of the two has {odd[0]}")
        for name, target in wanted.items():
            here, there = (f"{each.dtype} {list(each.shape)}" for each in (target, found[name]))
            if here != there:
                raise ValueError(f"{self.folder} does not fit {kind}: {name} is {there}, needed {here}")
        fill([(target, partial(found[name].read, ())) for name, target in wanted.items()])
        return sum(target.nbytes for target in wanted.values())

    def _require_alike(self, stored: Mapping[str, Any], share: Mapping[str, Any]) -> None:
        for name, wanted in share.items():
            if name != "rank" and stored.get(name) != wanted:
                raise ValueError(
                    f"{self.folder} holds weights for {name} {stored.get(name) or 'none'!r}, and the engine has "
                    f"{wanted or 'none'!r}: start it alike, or save them anew with save_sharded_state"
                )

    def _parts(self, facts: Mapping[str, Any], rank: int) -> Iterator[LazyTensor]:
        pattern = facts["pattern"].replace("{rank}", str(rank))
        part = 0
        while (path := self.folder / pattern.replace("{part}", str(part))).is_file():
            yield from SafetensorsLoader.read_file(path)
            part += 1
        if not part:
            raise ValueError(f"{self.folder} lacks {path.name}, the weights of rank {rank}")

    def _facts(self) -> Any:
        path = self.folder / FACTS
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            pattern, _, _ = facts["pattern"], facts["share"].items(), facts["tensors"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} does not say what was stored: {error!r}") from None
        if not isinstance(pattern, str) or "/" in pattern or "{rank}" not in pattern or "{part}" not in pattern:
            raise ValueError(f"{path}: the pattern {pattern!r:.80} must be a file name with {{rank}} and {{part}}")
        return facts

    def store(self, model: Model, source: WeightLoader, *, pattern: str = "", max_size: int = 0) -> None:
        _require_here(model)
        share, pattern = model.share, pattern or PATTERN
        if "/" in pattern or "{rank}" not in pattern or "{part}" not in pattern:
            raise ValueError(f"pattern must be a file name with {{rank}} and {{part}}, got {pattern!r:.80}")
        if self.folder.resolve() == source.folder.resolve():
            raise ValueError(f"{self.folder} holds the checkpoint itself; name another folder for its state")
        self.folder.mkdir(parents=True, exist_ok=True)
        own = pattern.replace("{rank}", str(share["rank"]))
        for old in self.folder.glob(own.replace("{part}", "*")):
            old.unlink()
        try:
            for part, tensors in enumerate(_parts(state_of(model), max_size or MAX_SIZE)):
                save_file(tensors, self.folder / own.replace("{part}", str(part)), {"format": "pt"})
        finally:
            model.finish_load()
        if share["rank"]:
            return
        for path in source.folder.iterdir():
            if path.suffix in _COPIED and path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, self.folder / path.name)
        facts = {
            "share": {name: value for name, value in share.items() if name != "rank"},
            "pattern": pattern,
            "tensors": {tensor.name: _noted(tensor) for tensor in source.tensors()},
        }
        (self.folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _require_here(model: Model) -> None:
    """Raises `ValueError` where not all weights of the model are on the device at once."""
    if moves_weights(model):
        raise ValueError(
            "sharded_state stores and reads all weights of a device at once, and cpu_offload_gb keeps some in host "
            "memory: leave cpu_offload_gb out, or load another format"
        )


def state_of(model: Model) -> dict[str, Tensor]:
    """The tensors that loading has filled, or made of what it filled, by their names in the model; each once.

    Their weights are unpacked; the caller has them packed again by `Model.finish_load`.
    """
    model.unpack_weights()
    filled = {
        id(slot.parameter)
        for module in model.modules()
        for slot in getattr(module, "weight_slots", list)()
        if slot.is_read
    }
    found = {name: parameter.data for name, parameter in model.named_parameters() if not parameter.is_meta}
    return found | {name: buffer for name, buffer in model.named_buffers() if id(buffer) in filled}


def _parts(state: Mapping[str, Tensor], max_size: int) -> Iterator[dict[str, Tensor]]:
    """The tensors on the host, in runs of at most so many bytes, or of one tensor."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in state.items():
        if part and size + tensor.nbytes > max_size:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield part


def _noted(tensor: LazyTensor) -> tuple[str, tuple[int, ...], str]:
    """(type, shape, a digest of one row) of a checkpoint tensor."""
    row = tuple(slice(size // 2, size // 2 + 1) for size in tensor.shape[:-1])
    flat = tensor.read(row).reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tensor.shape, hashlib.sha256(some.numpy().tobytes()).hexdigest()
