"""`frame doctor MODEL`: what a checkpoint needs and which limit it meets first, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from frame.interfaces import Command
from frame.settings import (
    ConfigError,
    FlagParser,
    FrameConfig,
    add_config_flags,
    config_from_arguments,
    fetch_model,
    read_checkpoint,
)

if TYPE_CHECKING:
    from .machine import Device

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class DoctorCommand(Command):
    """Reads config.json and the headers of the weights; exits with 1 when no engine would start."""

    help = "Predict memory, capacity and load time, and the limit that is met first: frame doctor [MODEL]."
    examples = (
        "frame doctor /models/qwen3",
        "frame doctor /models/qwen3 --platform cuda --memory-gib 80 --max-model-len 32k",
        "frame doctor /models/qwen3 --json",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the device's facts, and a flag for every setting of the engine."""
        parser.add_argument(
            "--memory-gib",
            type=float,
            metavar="G",
            help="Memory of the device to predict for, in GiB; default: the memory of this machine's.",
        )
        parser.add_argument(
            "--disk-gib-per-s",
            type=float,
            default=1.5,
            metavar="R",
            help="GiB of weights that are read in a second (default: %(default)s).",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        add_config_flags(cast("FlagParser", parser))

    def run(self, arguments: argparse.Namespace) -> int:
        """Prints the prediction."""
        from .facts import as_dict, cache_bytes, parts_of
        from .machine import find_devices
        from .prediction import predict
        from .tiers import tier_of
        from .verdict import Verdict, judge

        for name in ("memory_gib", "disk_gib_per_s"):
            value = getattr(arguments, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        config = config_from_arguments(arguments)
        checkpoint = read_checkpoint(fetch_model(config, only_cached=True))
        devices = find_devices(config.executor.platform, arguments.memory_gib, _devices_here(config))
        prediction = predict(config, checkpoint, devices[0], arguments.disk_gib_per_s, _by_rank(config, devices))
        verdict = judge(prediction)
        found = as_dict(prediction)
        tier = tier_of(config, prediction, parts_of(prediction), sum(cache_bytes(prediction)))
        if tier is not None:
            found["tier"] = tier.as_dict()
            if tier.problem and verdict.works:
                verdict = Verdict("kv_connector", tier.problem, tier.change, works=False)
        found["binding_limit"] = {"name": verdict.limit, "why": verdict.why, "change": verdict.change}
        found["starts"] = verdict.works
        print(json.dumps(found, indent=1) if arguments.json else _text(found))
        return 0 if verdict.works else 1


def _ranks(config: FrameConfig) -> int:
    """Ranks of one engine."""
    executor = config.executor
    stage = executor.tensor_parallel_size * executor.prefill_context_parallel_size
    return stage * executor.pipeline_parallel_size


def _devices_here(config: FrameConfig) -> int:
    """Devices that the engines of this machine take."""
    return len(config.data_parallel.local_ranks) * _ranks(config) // config.executor.nnodes


def _by_rank(config: FrameConfig, devices: Sequence[Device]) -> list[Device]:
    """The device of each rank of the first engine, none where the model is not divided.

    Those of other machines are taken to be like this one's. Raises `ConfigError` where there are too few.
    """
    needed, ranks = _devices_here(config), _ranks(config)
    if len(devices) < needed:
        raise ConfigError(
            f"{needed} devices are needed, and this machine has {len(devices)}; --memory-gib says how much memory "
            "each has that is not here"
        )
    executor = config.executor
    if ranks == executor.decode_context_parallel_size == 1 and not executor.enable_expert_parallel:
        return []
    return [devices[rank % max(1, ranks // config.executor.nnodes)] for rank in range(ranks)]


def _text(found: dict[str, Any]) -> str:
    weights, cache, capacity = found["weights"], found["kv_cache"], found["capacity"]
    stored = ", ".join(f"{size(value)} {name}" for name, value in weights["file_bytes_by_dtype"].items())
    count = "1 file" if weights["files"] == 1 else f"{weights['files']} files"
    files = f"{stored} in {count}" if weights["files"] else "not there yet: from config.json"
    in_step = "" if cache["set_by"] else " in a step"
    several = "ranks" in found
    lines = [
        f"{found['architecture']} in {found['model']}",
        f"on {found['device']['name']}: {size(found['device']['total_bytes'])}, "
        f"{size(found['device']['free_bytes'])} free",
        "",
        f"weights          {size(weights['num_bytes'])} as {weights.get('quantization', weights['dtype'])} ({files})",
    ]
    if "host_bytes" in weights:
        lines.append(
            f"in host memory   {size(weights['host_bytes'])} of the weights of a device, which has room for "
            f"{size(weights['ring_bytes'])} of them at a time"
        )
    lines += _rank_lines(found) if several else []
    lines += [f"{name:<16} {size(value)}" for name, value in found["memory"].items() if name != "weights" and value]
    if cache["set_by"] is None:
        lines.append("KV cache         none: each token of an encoder sees its whole prompt at once")
    elif not cache["num_blocks"]:
        lines.append(
            f"KV cache         none: {size(cache['available_bytes'])} hold no request (set by: {cache['set_by']})"
        )
    elif cache["bytes_per_token"]:
        lines.append(
            f"KV cache         {size(cache['num_bytes'])} as {cache['dtype']}: {cache['num_blocks']:,} blocks of "
            f"{cache['block_size']} tokens (set by: {cache['set_by']})"
        )
    else:
        lines.append(f"KV cache         {size(cache['num_bytes'])}, states alone (set by: {cache['set_by']})")
    lines += [*map(_group_line, cache["groups"]), *_state_lines(cache["states"]), *_tier_lines(found.get("tier"))]
    tokens = "any number of" if capacity["tokens"] is None else f"{capacity['tokens']:,}"
    lines += [
        f"longest request  {capacity['longest_request']:,} tokens of max_model_len {capacity['max_model_len']:,} "
        f"(the model's own: {capacity['model_max_len']:,})",
        f"capacity         {tokens} tokens{in_step}; {capacity['full_length_requests']:,} requests of "
        f"full length (max_num_seqs {capacity['max_num_seqs']:,})",
        f"load time        about {found['load_seconds']:g} s",
        "",
        f"binding limit    {found['binding_limit']['name']}: {found['binding_limit']['why']}",
        f"what to change   {found['binding_limit']['change']}",
        "",
        "assumed:",
        *(f"- {line}" for line in found["assumptions"]),
    ]
    return "\n".join(lines)


def _group_line(group: dict[str, Any]) -> str:
    if group["bytes_per_state"]:
        return (
            f"  group          {group['layers']} layers, a state of {size(group['bytes_per_state'])} for each request"
        )
    window = f"window of {group['window']}" if group["window"] else "every token"
    window += " of the encoder's" if group["kind"] == "CrossKV" else ""
    return f"  group          {group['layers']} layers, {window}, {size(group['bytes_per_token'])} a token"


def _state_lines(states: dict[str, int] | None) -> list[str]:
    """How many states there are, none where layers keep tokens alone."""
    if states is None:
        return []
    kept, tokens = states["num_checkpoints"], states["checkpoint_tokens"]
    prefixes = f"{kept:,} of prefixes of a multiple of {tokens} tokens" if tokens else "none of prefixes"
    each = size(states["bytes_per_state"])
    return [f"states           {states['num_live']:,} of running requests, {prefixes}; {each} each"]


def _tier_lines(tier: dict[str, Any] | None) -> list[str]:
    """What the KV connector holds, none without one."""
    if tier is None:
        return []
    lines = [f"tier             {tier['connector']}: {tier['held'] or tier['problem']}"]
    if not tier["block_bytes"]:
        return lines
    by_rank = tier["block_bytes_by_rank"]
    ranks = ""
    if len(by_rank) > 1:
        alike = len(set(by_rank)) == 1
        ranks = f", {size(by_rank[0])} on each rank" if alike else f", by rank {', '.join(map(size, by_rank))}"
    lines.append(
        f"  a block        {tier['block_tokens']} tokens, {size(tier['block_bytes'])}{ranks}; "
        f"{size(tier['bytes_per_token'])} a token, {tier['tokens_per_gib']:,} tokens a GiB"
    )
    if tier["num_blocks"]:
        lines.append(
            f"  holds          {tier['num_blocks']:,} blocks, {tier['tokens']:,} tokens, in {size(tier['size_bytes'])}"
        )
    return lines


def _rank_lines(found: dict[str, Any]) -> list[str]:
    """What each rank holds, and that the lines after these are about the one with the least room."""
    lines = [f"layout           {found['layout'] or 'one rank'}"]
    for rank in found["ranks"]:
        first, stop = rank["layers"]
        layers = f"layers {first}–{stop - 1}, " if stop > first + 1 else f"layer {first}, "
        experts = f"{rank['experts']} experts a layer, " if rank["experts"] else ""
        states = f", {size(rank['bytes_per_state'])} a state" if rank["bytes_per_state"] else ""
        lines.append(
            f"  rank {rank['rank']:<9} {layers}{experts}weights {size(rank['weights_bytes'])}, KV cache "
            f"{size(rank['cache_bytes'])} of {size(rank['available_bytes'])}{states}; "
            f"{'fits' if rank['fits'] else 'does not fit'} {rank['device']}"
        )
    return lines


def size(num_bytes: float) -> str:
    """A number of bytes in its largest unit."""
    for unit, name in _UNITS:
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"
