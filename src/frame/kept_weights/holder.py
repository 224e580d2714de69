"""A worker's side of kept weights: they are allocated in held memory, found there, or loaded and then given to keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.held_memory import HeldMemory
from frame.core.interfaces.loader import WeightLoader
from frame.core.interfaces.model import Model

from .checksum import checksum
from .exchange import ask
from .messages import Drop, Keep, Renew, Suspend
from .placing import LARGE_BYTES, Place, Placing

logger = logging.getLogger("frame.worker")

#: Part of all weights that may be copies beside those that lie in held memory themselves.
_MOST_COPIED = 16
#: Gives `KVLayout.model` for config.json and what reads its weights.
DigestOf: TypeAlias = Callable[[Mapping[str, Any], WeightLoader], str]
#: Where copies begin, in bytes.
_ALIGNMENT = 16


class WeightTable(msgspec.Struct, frozen=True):
    """What lies in the memory of a worker's weights: the sizes of its parts, and where in them each tensor is.

    `digest` is the model's (`KVLayout.model`), `checksum` that of the parts with tensors and of the copies.
    """

    parts: list[int]
    places: list[Place]
    copied_bytes: int
    digest: str
    checksum: str


class NoHolder:
    """Keeps no weights; they are loaded."""

    def placing(self) -> AbstractContextManager[object]:
        """Within it the model is made."""
        return nullcontext()

    def found(self, model: Model) -> str | None:
        """Fills the model with the weights that were kept and returns its digest; None where it must be loaded."""
        del model
        return None

    def keep(self, model: Model, digest: str, digest_of: DigestOf) -> None:
        """Has the weights kept, which are loaded and finished; called once, also for those that were found.

        `digest_of` gives the digest of others that may follow, of their config.json and loader.
        """

    def suspend(self, config: FrameConfig, loader: WeightLoader) -> None:
        """Has nobody find them; called before `loader` changes them in place to those of `config`.

        Raises `OSError` where that cannot be had.
        """

    def renew(self, model: Model, loader: WeightLoader) -> None:
        """Has them kept again, now that they have changed."""

    def hide(self) -> None:
        """Has nobody find them; called before their memory may be freed. Raises `OSError` where that cannot be had."""

    def show(self) -> None:
        """Has them found again: their memory was not freed after all."""

    def drop(self) -> None:
        """Gives their memory back, which is freed here, too."""


class WeightHolder(NoHolder):
    """Of the worker of `rank`, whose keeper listens at `address`.

    `key` is that of its weights, `kept` the table of those that lie in `memory` already. `key_of` gives the key for a
    configuration and a folder, which has changed where the checkpoint's files have.
    """

    def __init__(
        self,
        memory: HeldMemory,
        device: torch.device,
        address: str,
        rank: int,
        key_of: Callable[[FrameConfig, Path], str],
        source: tuple[FrameConfig, Path],
        key: str,
        kept: WeightTable | None,
    ) -> None:
        self._memory, self._device = memory, device
        self._address, self._rank = address, rank
        self._key_of, self._source, self._key = key_of, source, key
        self._digest_of: DigestOf = lambda hf, loader: ""
        self._kept = kept
        self._told = b"" if kept is None else msgspec.msgpack.encode(kept)  # the table that the keeper has
        self._is_kept = kept is not None  # by the keeper, now
        self._against = ""  # why nothing will be kept
        self._placed: Placing | None = None
        self._places: list[Place] = []
        self._copied: Tensor | None = None  # behind the parts

    @contextmanager
    def placing(self) -> Iterator[None]:
        self._placed = Placing(self._memory, self._device)
        with self._placed:
            yield

    def found(self, model: Model) -> str | None:
        if self._placed is None:
            return None
        began = time.perf_counter()
        tensors = weights_of(model)
        self._places = self._placed.places(tensors)
        kept = self._kept
        if kept is None:
            return None
        parts = [len(part) for part in self._placed.parts]
        if (parts, self._places) != (kept.parts, kept.places):
            self._refuse("the model that was made lays its tensors out in another way")
            return None
        copies = self._copied = self._memory.take(kept.copied_bytes)
        if self._checksum(copies) != kept.checksum:
            self._refuse("they have changed since")
            return None
        for place, copy in self._copies(copies):
            tensors[place.name].data.copy_(copy)
        model.finish_load()  # of what is made of weights; layers with a method have nothing to finish
        changed = any(not _same(tensors[place.name], copy) for place, copy in self._copies(copies))
        if changed or self._checksum(copies) != kept.checksum:
            self._against = "its layers change weights whenever they are finished"
            self._refuse(self._against)
            return None
        num_bytes, seconds = sum(tensor.nbytes for tensor in tensors.values()), time.perf_counter() - began
        logger.info(
            "rank %d: %.2f GB of weights were kept by the server, none is read; found in %.2f s",
            self._rank, num_bytes / 1e9, seconds,
        )  # fmt: skip
        return kept.digest

    def keep(self, model: Model, digest: str, digest_of: DigestOf) -> None:
        self._digest_of = digest_of
        if not self._is_kept:
            self._try(lambda: self._keep(model, digest))
        self._memory.release()

    def suspend(self, config: FrameConfig, loader: WeightLoader) -> None:
        if self._is_kept:
            self._source = config, loader.folder
            self._key = self._key_of(*self._source)
            self.hide()

    def hide(self) -> None:
        if self._is_kept:
            with suppress(ConnectionError):  # who kept them is gone, and with it what was kept
                ask(self._address, Suspend(self._rank))

    def show(self) -> None:
        if self._is_kept:
            self._is_kept = False
            self._try(self._tell)

    def renew(self, model: Model, loader: WeightLoader) -> None:
        if self._is_kept:
            self._is_kept = False
            self._try(lambda: self._renew(model, loader))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            if not self._against:
                work()
        except (OSError, RuntimeError, ValueError) as error:
            self._against = str(error)
        if self._against:
            logger.warning("rank %d: the server keeps no weights: %s", self._rank, self._against)

    def _keep(self, model: Model, digest: str) -> None:
        table = self._table(model, digest)
        self._require_same_files()
        pieces = self._memory.pieces()
        sizes = [piece.num_bytes for piece in pieces]
        self._told = msgspec.msgpack.encode(table)
        question = Keep(self._rank, self._key, self._told, sizes)
        ask(self._address, question, [piece.descriptor for piece in pieces])
        self._is_kept = True
        logger.info("rank %d: the server keeps %.2f GB of weights", self._rank, sum(sizes) / 1e9)

    def _renew(self, model: Model, loader: WeightLoader) -> None:
        try:
            table = self._table(model, self._digest_of(read_checkpoint(self._source[0]).hf, loader))
            self._require_same_files()
            self._told = msgspec.msgpack.encode(table)
            self._tell()
        except Exception:
            ask(self._address, Drop(self._rank))
            raise
        logger.info("rank %d: the server keeps the weights of %s from now on", self._rank, loader.folder)

    def _tell(self) -> None:
        ask(self._address, Renew(self._rank, self._key, self._told))
        self._is_kept = True

    def drop(self) -> None:
        if self._is_kept:
            self._is_kept = False
            try:
                ask(self._address, Drop(self._rank))
            except ConnectionError:  # who kept them is gone, and with it what was kept
                pass
            except OSError as error:
                logger.warning("rank %d: the server still holds the memory of its weights: %s", self._rank, error)
                return
            logger.info("rank %d: the server keeps its weights no longer", self._rank)

    def _require_same_files(self) -> None:
        if self._key_of(*self._source) != self._key:
            raise ValueError("the checkpoint's files changed while they were read")

    def _refuse(self, reason: str) -> None:
        logger.warning("rank %d: weights were kept, and are loaded anew: %s", self._rank, reason)
        self.drop()
        self._kept = None

    def _table(self, model: Model, digest: str) -> WeightTable:
        """Says where the weights lie, and copies those that do not lie where they can be held."""
        placed, tensors = self._placed, weights_of(model)
        if placed is None or [place.name for place in self._places] != list(tensors):
            raise ValueError("the model has other tensors than when it was made")
        outside = 0
        for place in self._places:
            tensor = tensors[place.name]
            if (tuple(tensor.shape), str(tensor.dtype)) != (place.shape, f"torch.{place.dtype}"):
                raise ValueError(f"{place.name} changed its form when it was loaded")
            if place.part < 0:
                outside += tensor.nbytes if tensor.nbytes >= LARGE_BYTES else 0
            elif tensor.is_mkldnn:  # packed elsewhere, for which there is a plain one here
                placed.tensor(place).copy_(_plain(tensor))
            elif tensor.data_ptr() != placed.tensor(place).data_ptr() or not tensor.is_contiguous():
                raise ValueError(f"{place.name} lies elsewhere since it was loaded")
        if outside * _MOST_COPIED > sum(tensor.nbytes for tensor in tensors.values()):
            raise ValueError(f"{outside >> 20} MiB of this model are not allocated where they could be kept")
        parts = [len(part) for part in placed.parts]
        copied_bytes = sum(_padded(tensors[place.name].nbytes) for place in self._places if place.part < 0)
        if self._copied is None:
            self._copied = self._memory.take(copied_bytes)
        copies = self._copied
        copies.zero_()
        for place, copy in self._copies(copies):
            copy.copy_(_plain(tensors[place.name]))
        return WeightTable(parts, self._places, copied_bytes, digest, self._checksum(copies))

    def _copies(self, copies: Tensor) -> Iterator[tuple[Place, Tensor]]:
        """The places of what is copied, each with its copy."""
        offset = 0
        for place in self._places:
            if place.part < 0:
                dtype: torch.dtype = getattr(torch, place.dtype)
                num_bytes = torch.Size(place.shape).numel() * dtype.itemsize
                yield place, copies[offset : offset + num_bytes].view(dtype).view(place.shape)
                offset += _padded(num_bytes)

    def _checksum(self, copies: Tensor) -> str:
        if self._placed is None:
            return ""
        used = sorted({place.part for place in self._places if place.part >= 0})
        return checksum([*(self._placed.parts[part] for part in used), copies])


def weights_of(model: Model) -> dict[str, Tensor]:
    """The tensors that loading fills, or makes of what it filled, by their names in the model; each once."""
    filled = {
        id(slot.parameter)
        for module in model.modules()
        for slot in getattr(module, "weight_slots", list)()
        if slot.is_read
    }
    found = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    return found | {name: buffer for name, buffer in model.named_buffers() if id(buffer) in filled}


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _same(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a tensor has the bits of its copy."""
    return torch.equal(_plain(tensor).contiguous().view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_mkldnn else tensor.detach()
