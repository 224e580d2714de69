"""The flags, the engine and the prompts of benchmarks that run an engine in this process.

Imports torch only when an engine starts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from frame.settings import (
    ConfigError,
    FlagParser,
    FrameConfig,
    add_config_flags,
    config_from_arguments,
    fetch_model,
    find_folder,
    read_checkpoint,
)

from .output import add_output_flags
from .text_source import TextSource, TokenizerSource

if TYPE_CHECKING:
    from frame import LLM


class IdSource:
    """Prompts as token ids, so that no tokenizer takes part."""

    name = ""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def ids(self, length: int, draw: random.Random) -> list[int]:
        return [draw.randrange(self._vocab_size) for _ in range(length)]

    def text(self, ids: Sequence[int]) -> tuple[Sequence[int], int]:
        return list(ids), len(ids)

    def count(self, text: str) -> int:
        raise ConfigError(f"texts cannot be counted without a tokenizer: {text[:40]!r}")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `[MODEL]`, a flag for every setting of the engine, and the flags of output files."""
    add_output_flags(parser)
    add_config_flags(cast("FlagParser", parser))


def engine_config(arguments: argparse.Namespace) -> FrameConfig:
    """The configuration; raises `ConfigError` before anything is loaded, also where MODEL is not a checkpoint."""
    config = fetch_model(config_from_arguments(arguments), command=True)
    read_checkpoint(config)
    return config


def start_engine(config: FrameConfig) -> LLM:
    """An engine in this process; raises `ConfigError` with the reason where it cannot start."""
    from frame import LLM, LLMEngine

    try:
        return LLM.from_engine(LLMEngine.from_config(config))
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"the engine does not start: {error}") from error


def prompt_source(config: FrameConfig, dataset: str) -> TextSource:
    """Random token ids for generated prompts; the checkpoint's tokenizer for prompts from a file."""
    if dataset in ("sharegpt", "custom"):
        return TokenizerSource(find_folder(config.model.model, config.model.revision))
    return IdSource(read_checkpoint(config).vocab_size)


def as_prompts(prompts: Sequence[str | Sequence[int]]) -> list[Any]:
    """The prompts in the form that `LLM.generate` takes."""
    return [one if isinstance(one, str) else {"prompt_token_ids": list(one)} for one in prompts]


def engine_facts(llm: LLM, config: FrameConfig) -> dict[str, Any]:
    """The model, platform, dtype, attention backends and KV blocks of the engine, for the results."""
    info = llm.llm_engine.core.info
    return {
        "model_id": next(iter(config.model.served_model_name), config.model.model) or "demo",
        "platform": info.platform,
        "dtype": info.dtype,
        "attention": ",".join(sorted(set(info.attention))),
        "num_gpu_blocks": info.num_blocks,
        "block_size": info.block_size,
    }
