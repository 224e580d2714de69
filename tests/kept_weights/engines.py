"""Engines in this process, one after the other, that share a keeper of weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.plugin_host.model_sources import fetch_model
from frame.core.plugin_host.registry import Registry
from frame.kept_weights.keeper import WeightKeeper
from frame.testing.engines import SMALL, greedy, prompts, running

#: Lines of the log that say what became of weights.
FOUND, KEEPS, LOADED = "none is read; found in", "the server keeps 0.", "of weights in"
LEFT, CHANGES = "the server keeps no weights", "keeps its weights no longer"


@contextmanager
def engine_of(folder: Path, keeper: WeightKeeper, **settings: Any) -> Iterator[Engine]:
    given = {**SMALL, "model": str(folder), "weight_keeper": keeper.address, **settings}
    with running(fetch_model(from_flat(given)), Registry.load()) as engine:
        yield engine


def served(folder: Path, keeper: WeightKeeper, **settings: Any) -> list[list[int]]:
    with engine_of(folder, keeper, **settings) as engine:
        return greedy(engine, prompts(512), 8)


def damage(folder: Path, *, times: bool = True) -> None:
    """Overwrites the weights of safetensors files, so that whoever reads them is found out.

    Headers, sizes and, with `times`, times stay.
    """
    for path in folder.glob("*.safetensors"):
        status = path.stat()
        with open(path, "r+b") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
            file.seek(header)
            file.write(b"\x11" * (status.st_size - header))
        if times:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
