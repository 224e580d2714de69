"""What the KV connector of the settings would hold: blocks, tokens, and whether the machine has room for them.

Arithmetic alone, by the rules of frame's own connectors, restated here because they need torch; tests compare the two.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.interfaces import KVLayout
from frame.links.host_memory import host_memory
from frame.settings import FrameConfig, Registry

from .prediction import Prediction

GIB = 1 << 30
#: Most bytes of a piece of host memory, unless one block needs more; bytes of a file beside its block.
PIECE_BYTES = 256 << 20
FILE_BYTES = 48


@dataclass(frozen=True)
class Tier:
    """What a connector keeps blocks in. `bytes_by_rank` are what a block of `block_tokens` tokens takes on each rank.

    `size_bytes` is what all ranks together may hold, `num_blocks` how many blocks that is; both are None where the
    connector has no size. `held` says it in words. `problem` is the reason for which no engine would start, and
    `change` what to do about it.
    """

    connector: str
    block_tokens: int
    bytes_by_rank: list[int]
    size_bytes: int | None = None
    num_blocks: int | None = None
    held: str = ""
    problem: str = ""
    change: str = ""

    @property
    def bytes_per_token(self) -> float:
        """On all ranks together."""
        return sum(self.bytes_by_rank) / self.block_tokens

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        each = sum(self.bytes_by_rank)
        return {
            "connector": self.connector,
            "block_tokens": self.block_tokens,
            "block_bytes": each,
            "block_bytes_by_rank": self.bytes_by_rank,
            "bytes_per_token": self.bytes_per_token,
            "tokens_per_gib": GIB // each * self.block_tokens if each else None,
            "size_bytes": self.size_bytes,
            "num_blocks": self.num_blocks,
            "tokens": None if self.num_blocks is None else self.num_blocks * self.block_tokens,
            "held": self.held,
            "problem": self.problem or None,
        }


def tier_of(config: FrameConfig, prediction: Prediction, parts: list[KVLayout], cache_bytes: int) -> Tier | None:
    """None without a connector or a cache. `parts` are the layouts of the ranks, whose caches take `cache_bytes`.

    Raises `PluginError` for a connector that is not installed and options that it does not have.
    """
    name = config.transfer.kv_connector
    if name is None:
        return None
    registry = Registry.load()
    provider = registry.choose("connector", name)
    options = registry.options(provider, config)
    if not parts:
        return None
    grain = parts[0].grain
    rows = [_row_bytes(part) for part in parts]
    for part in parts:
        for group in part.groups:
            if group.keeps_encoded:
                problem = f"the {provider.name} connector cannot keep an encoder's tokens of layer {group.layers[0]}"
                return Tier(provider.name, grain, rows, problem=problem, change="leave out --kv-connector")
    if not sum(rows):
        return Tier(provider.name, grain, rows, held="states alone, which are not counted here")
    if any(group.keeps_states for part in parts for group in part.groups):
        return Tier(provider.name, grain, rows, held="tokens' blocks, as below, and states, which are not counted here")
    kinds = {"offload": _offload, "disk": _disk, "peer": _peer, "nixl": _engine}
    made = kinds.get(provider.name, _other)
    return made(config, provider.name, grain, rows, options, prediction, cache_bytes)


def _row_bytes(part: KVLayout) -> int:
    """What a grain of tokens takes on one rank."""
    return sum(
        part.grain // group.block_size * sum(spec.block_bytes(group.block_size) for spec in group.specs)
        for group in part.groups
        if not group.keeps_states
    )


def rows_in(num_bytes: int, row_bytes: int) -> int:
    """How many rows host memory of so many bytes holds, which is taken in pieces of powers of two."""
    count, most = 0, max(PIECE_BYTES, 1 << (row_bytes - 1).bit_length())
    while num_bytes >= row_bytes:
        size = min(most, 1 << (num_bytes.bit_length() - 1))
        if size < row_bytes:
            break
        count += size // row_bytes
        num_bytes -= size
    return count


def _offload(
    config: FrameConfig, name: str, grain: int, rows: list[int], options: Any, one: Prediction, cache_bytes: int
) -> Tier:
    tokens = options.block_size or grain
    size, own = int(options.size * GIB), config.executor.nnodes
    if tokens % grain:
        problem = f"block_size of the tier is {tokens}, and must be a multiple of {grain}, what blocks here hold"
        return Tier(name, grain, rows, problem=problem, change=f"--plugin.offload.block_size {grain}")
    each = [row * (tokens // grain) for row in rows]
    share = size // len(rows)
    blocks = min(rows_in(share, row) for row in rows if row) // (tokens // grain)
    here = share * (len(rows) // own) * len(config.data_parallel.local_ranks)
    total, available, what = _host(one, cache_bytes)
    held = f"{options.size:g} GiB of host memory, policy {options.policy}"
    problem, change = "", "lower --kv-offloading-size"
    if here > total:
        problem = f"{_gib(here)} of blocks are to be kept, and {what} has {_gib(total)} of memory"
    elif here > available:
        problem = f"{_gib(here)} of blocks are to be kept, and {_gib(available)} of the memory of {what} are available"
        change += ", or end what else uses it"
    elif not blocks:
        problem = (
            f"{options.size:g} GiB of host memory hold no block of {tokens} tokens, which take "
            f"{sum(each) / (1 << 20):.1f} MiB"
        )
        change = "raise --kv-offloading-size"
    else:
        held += f"; fits {what}, which has {_gib(total)}, {_gib(available)} of them available"
    return Tier(name, tokens, each, size, blocks, held, problem, change)


def _disk(
    config: FrameConfig, name: str, grain: int, rows: list[int], options: Any, one: Prediction, cache_bytes: int
) -> Tier:
    del config, one, cache_bytes
    folder: Path = options.folder
    there = next(one for one in (folder, *folder.parents) if one.exists())
    free, size = shutil.disk_usage(there).free, options.max_bytes
    held = f"files in {folder}, which has {_gib(free)} free"
    if size is None:
        return Tier(name, grain, rows, held=held + "; no limit is set (max_bytes)")
    blocks = size // sum(row + FILE_BYTES for row in rows)
    if not blocks:
        problem = f"max_bytes {size} hold no block of {grain} tokens, which take {sum(rows)} bytes"
        return Tier(name, grain, rows, size, 0, held, problem, "raise --plugin.disk.max_bytes")
    return Tier(name, grain, rows, size, blocks, held)


def _peer(
    config: FrameConfig, name: str, grain: int, rows: list[int], options: Any, one: Prediction, cache_bytes: int
) -> Tier:
    if options.listen is None or config.transfer.kv_role == "consumer":
        return Tier(name, grain, rows, held="nothing here: blocks are read from peers")
    size, blocks = options.max_bytes * len(rows), min(options.max_bytes // row for row in rows if row)
    total, _, what = _host(one, cache_bytes)
    held = f"{_gib(options.max_bytes)} of host memory on each worker, of {_gib(total)} that {what} has"
    problem, change = "", "lower --plugin.peer.max_bytes"
    if size > total:
        problem = f"{_gib(size)} of copies are to be kept, and {what} has {_gib(total)} of memory"
    elif not blocks:
        problem = f"max_bytes {options.max_bytes} hold no block of {grain} tokens, which take {max(rows)} on a worker"
        change = "raise --plugin.peer.max_bytes"
    return Tier(name, grain, rows, size, blocks, held, problem, change)


def _engine(
    config: FrameConfig, name: str, grain: int, rows: list[int], options: Any, one: Prediction, cache_bytes: int
) -> Tier:
    held = "nothing of its own: blocks are read from another engine's cache"
    if options.secret_file is None:
        held = "nothing: without a secret_file this engine exchanges no blocks"
    elif one.layout is not None and config.transfer.kv_role != "consumer":
        most = int((one.layout.pools[0] - 1) * options.max_held_share)
        held = f"up to {most:,} blocks of the KV cache are kept for other engines, {options.lease_seconds:g} s each"
    if options.host_buffer:
        total, available, what = _host(one, cache_bytes)
        held += f"; a copy of {_gib(cache_bytes)} passes through host memory"
        if cache_bytes > available:
            problem = (
                f"host_buffer takes {_gib(cache_bytes)}, and {_gib(available)} of the {_gib(total)} of {what} are free"
            )
            return Tier(name, grain, rows, held=held, problem=problem, change="lower --kv-cache-memory-bytes")
    return Tier(name, grain, rows, held=held)


def _other(
    config: FrameConfig, name: str, grain: int, rows: list[int], options: Any, one: Prediction, cache_bytes: int
) -> Tier:
    del config, options, one, cache_bytes
    return Tier(name, grain, rows, held="what this connector keeps is not known here")


def _host(one: Prediction, cache_bytes: int) -> tuple[int, int, str]:
    """(bytes of memory, bytes that are left beside a CPU's engine, whose they are)."""
    if one.device.kind != "cpu":
        return *host_memory(), "this machine"
    total, available = (one.device.total_bytes, one.device.free_bytes) if one.device.stated else host_memory()
    what = one.device.name if one.device.stated else "this machine"
    return total, max(0, available - one.weights_bytes - cache_bytes), what


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
