"""Warns where every start waits for Python's compiler."""

from __future__ import annotations

import logging
import sys
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType

logger = logging.getLogger("frame.start")


def report_missing_bytecode(package: ModuleType) -> None:
    """Warns if Python compiles a large package from its sources in each process, and may not keep the result.

    A start on an H200's host took 2.5 s longer for that. pip compiles what it installs, so this concerns only images
    whose builders remove bytecode and forbid Python to write it.
    """
    source = package.__file__ or ""
    if not sys.dont_write_bytecode or not source.endswith(".py") or sys.implementation.cache_tag is None:
        return
    if Path(cache_from_source(source)).exists():
        return
    logger.warning(
        "%s has no bytecode and PYTHONDONTWRITEBYTECODE keeps Python from writing it, so that each start compiles "
        "its sources for seconds: run python -m compileall -q %s once, where the image is built",
        package.__name__, Path(source).parent,
    )  # fmt: skip
