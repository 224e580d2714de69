"""The requests of a run: random, with shared prefixes, or from a file; equal seeds make equal requests."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from frame.quoting import quoted
from frame.settings import ConfigError, near

from .record import BenchRequest
from .text_source import TextSource

DATASETS = ("random", "prefix_repetition", "shared-prefix", "sharegpt", "custom")
#: Conversations outside of these lengths are left out, as `vllm bench` does.
_MIN_LEN, _MAX_PROMPT, _MAX_TOTAL = 4, 1024, 2048
_DEFAULT_INPUT_LEN = 1024


def add_dataset_flags(parser: argparse.ArgumentParser, *, num_prompts: int, seed: bool = True) -> None:
    """Adds vLLM's dataset flags; without `seed`, because the caller has a flag `--seed` already."""
    group = parser.add_argument_group("dataset")
    add = group.add_argument
    add(
        "--dataset-name",
        default="random",
        metavar="NAME",
        help=f"One of {', '.join(DATASETS)} (shared-prefix is prefix_repetition). Default: random.",
    )
    add("--dataset-path", metavar="FILE", help="JSON or JSONL file of sharegpt and custom.")
    add("--num-prompts", type=int, default=num_prompts, metavar="N", help=f"Requests to send (default: {num_prompts}).")
    if seed:
        add("--seed", type=int, default=0, metavar="N", help="Seed of lengths, texts and arrivals (default: 0).")
    add(
        "--random-input-len",
        type=int,
        metavar="N",
        help="Prompt tokens (default: 1024, or half of what the model takes if that is less).",
    )
    add("--random-output-len", type=int, default=128, metavar="N", help="Output tokens (default: 128).")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths are drawn from [N(1-R), N(1+R)]; 0 ≤ R < 1 (default: 0).",
    )
    add("--random-prefix-len", type=int, default=0, metavar="N", help="Tokens that all random prompts begin with.")
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="Tokens of a prefix (256).")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="Tokens after it (256).")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="Different prefixes (10).")
    add("--prefix-repetition-output-len", type=int, default=128, metavar="N", help="Output tokens (128).")
    add("--sharegpt-output-len", type=int, metavar="N", help="Output tokens; default: as long as the file's answer.")
    add(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="N",
        help="Output tokens; -1: the row's output_tokens (default: 256).",
    )


def make_requests(
    arguments: argparse.Namespace, source: TextSource, max_model_len: int | None = None
) -> list[BenchRequest]:
    """`--num-prompts` requests; a file with fewer rows is repeated, and without a number is taken once.

    Raises `ConfigError`. `max_model_len` tokens are the most that the model takes, where that is known.
    """
    if arguments.num_prompts is not None and arguments.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {arguments.num_prompts}")
    draw = random.Random(arguments.seed)
    name = arguments.dataset_name
    if name == "random":
        if arguments.random_input_len is None:
            arguments.random_input_len = (
                _DEFAULT_INPUT_LEN if max_model_len is None else min(_DEFAULT_INPUT_LEN, max_model_len // 2)
            )
        return _random(arguments, source, draw)
    if name in ("prefix_repetition", "shared-prefix"):
        return _prefixes(arguments, source, draw)
    if name in ("sharegpt", "custom"):
        rows = list(_rows(arguments, source, draw))
        return [rows[index % len(rows)] for index in range(arguments.num_prompts or len(rows))]
    raise ConfigError(f"no dataset {quoted(name)}{near(name, DATASETS)}; there are: {', '.join(DATASETS)}")


def _positive(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")


def _random(arguments: argparse.Namespace, source: TextSource, draw: random.Random) -> list[BenchRequest]:
    _positive(arguments, "random_input_len", "random_output_len")
    ratio = arguments.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {ratio}")

    def length(middle: int) -> int:
        return draw.randint(max(1, int(middle * (1 - ratio))), max(1, int(middle * (1 + ratio))))

    prefix = source.ids(max(0, arguments.random_prefix_len), draw)
    made = []
    for _ in range(arguments.num_prompts):
        text, count = source.text(prefix + source.ids(length(arguments.random_input_len), draw))
        made.append(BenchRequest(text, length(arguments.random_output_len), count))
    return made


def _prefixes(arguments: argparse.Namespace, source: TextSource, draw: random.Random) -> list[BenchRequest]:
    names = ("prefix_len", "suffix_len", "num_prefixes", "output_len")
    _positive(arguments, *(f"prefix_repetition_{name}" for name in names))
    prefix_len, suffix_len, num_prefixes, output_len = (
        getattr(arguments, f"prefix_repetition_{name}") for name in names
    )
    prefixes = [source.ids(prefix_len, draw) for _ in range(num_prefixes)]
    made = []
    for index in range(arguments.num_prompts):
        text, count = source.text([*prefixes[index % num_prefixes], *source.ids(suffix_len, draw)])
        made.append(BenchRequest(text, output_len, count))
    draw.shuffle(made)
    return made


def _rows(arguments: argparse.Namespace, source: TextSource, draw: random.Random) -> Sequence[BenchRequest]:
    if not arguments.dataset_path:
        raise ConfigError(f"--dataset-name {arguments.dataset_name} needs --dataset-path FILE")
    path = Path(arguments.dataset_path).expanduser()
    rows = list(_read(path))
    if arguments.dataset_name == "sharegpt":
        made = [one for row in rows if (one := _conversation(row, arguments.sharegpt_output_len, source)) is not None]
        draw.shuffle(made)
    else:
        made = [
            _custom(row, number, path, arguments.custom_output_len, source) for number, row in enumerate(rows, start=1)
        ]
    if not made:
        raise ConfigError(f"{path} holds no usable row for --dataset-name {arguments.dataset_name}")
    return made


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list or of a JSONL file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        yield from (row for row in rows if isinstance(row, dict))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number} must be an object, got {type(row).__name__}")
            yield row


def _conversation(row: dict[str, Any], output_len: int | None, source: TextSource) -> BenchRequest | None:
    """The first turn and the length of its answer; None for a conversation that is too short or too long."""
    turns = row.get("conversations", row.get("conversation"))
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [str(turn.get("value", turn.get("content", ""))) for turn in turns[:2] if isinstance(turn, dict)]
    if len(texts) < 2:
        return None
    prompt_len = source.count(texts[0])
    wanted = output_len or source.count(texts[1])
    fits = prompt_len >= _MIN_LEN and prompt_len <= _MAX_PROMPT and prompt_len + wanted <= _MAX_TOTAL
    if not fits or (output_len is None and wanted < _MIN_LEN):
        return None
    return BenchRequest(texts[0], wanted, prompt_len)


def _custom(row: dict[str, Any], number: int, path: Path, output_len: int, source: TextSource) -> BenchRequest:
    """`{"prompt": …}` or `{"messages": […]}`, with `output_tokens` where the flag is -1, and a `timestamp`."""
    messages, prompt = row.get("messages"), row.get("prompt")
    if isinstance(messages, list) and messages:
        prompt = "\n".join(str(one.get("content", "")) for one in messages if isinstance(one, dict))
    elif not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{path}, row {number} must have a text "prompt" or a list "messages"')
    wanted = row.get("output_tokens") if output_len == -1 else output_len
    if not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(f"{path}, row {number}: output_tokens must be a positive integer, got {quoted(wanted)}")
    at = row.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float | None) or not math.isfinite(at or 0):
        raise ConfigError(f"{path}, row {number}: timestamp must be seconds, got {quoted(at)}")
    return BenchRequest(str(prompt), wanted, source.count(str(prompt)), messages or None, at)
