"""Kernels that take longest to compile, compiled by a process of their own while torch is imported. Imports no torch.

Which those are of a model is read from a file, where `python -m tests.snapshots.early_kernels` writes what steps of
common models launch. An entry that nothing launches any more costs a compilation and is never wrong: Triton finds a
kernel by its source, types and constants.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from frame.settings import Checkpoint, read_checkpoint

from ...processors import num_processors
from .forks import ForkedGroup
from .triton_files import read_triton

SPECIALIZATIONS = Path(__file__).with_name("early_kernels.json")
#: Of fewer processors the compilers would take them from the import.
_MIN_PROCESSORS = 8
#: The only one that the file was written for, what a block of it may hold in shared memory, and how drivers ask for it.
_CAPABILITY, _SHARED_BYTES, _ATTRIBUTES = (9, 0), 227 << 10, (75, 76)
#: Models whose layers are alike, and have nothing that the file does not know.
_PLAIN = frozenset(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe"))
#: From as many tokens on rows are split in more than 16 parts.
_LONG = 4096
_SECONDS = 60.0
#: What a pipe takes at once.
_MOST_BYTES = 4096

logger = logging.getLogger("frame.platforms.early_kernels")


class EarlyKernels:
    """A forked process that compiles the kernels of `entries` and leaves them in Triton's cache on disk."""

    def __init__(self, entries: Sequence[dict[str, Any]], mark: Path) -> None:
        self._told, tells = os.pipe()
        os.set_blocking(self._told, False)
        self._keys = frozenset[str]()
        try:
            self._group = ForkedGroup(partial(_compile, entries, mark, tells), _SECONDS)
        finally:
            os.close(tells)

    def keys(self) -> frozenset[str]:
        """Hashes of the keys of those that others need not compile; has it stopped where it knows none yet."""
        if self._told >= 0:
            try:
                self._keys = frozenset(os.read(self._told, _MOST_BYTES).decode().split())
            except BlockingIOError:
                self._group.stop()
            os.close(self._told)
            self._told = -1
        return self._keys

    def wait(self) -> bool:
        """Returns when the process has ended; whether all of `keys` are in Triton's cache."""
        return self._group.wait() or not self._keys


#: At most one, between `begin` and `take`.
_running: list[EarlyKernels] = []


def begin(config: Any) -> None:
    """Starts the process where there is something to compile, time to do so, and room beside the import of torch."""
    _running.clear()  # one of an earlier start that came to nothing ends with this
    if (
        "torch" in sys.modules or config.executor.executor != "inline"
        or _settings().get("TRITON_INTERPRET") == "1" or num_processors() < _MIN_PROCESSORS
    ):  # fmt: skip
        return
    entries = wanted(facts_of(config, read_checkpoint(config)))
    if entries and not (mark := _mark(entries)).exists():
        _running.append(EarlyKernels(entries, mark))
        logger.debug("%d kernels are compiled while torch is imported", len(entries))


def take() -> EarlyKernels | None:
    """The process that was started, for whoever waits for its kernels; once."""
    return _running.pop() if _running else None


def facts_of(config: Any, checkpoint: Checkpoint) -> frozenset[str]:
    """What entries are chosen by; nothing where a model or the settings are not what the file was written for."""
    text = checkpoint.text
    dtype = checkpoint.dtype if config.model.dtype == "auto" else config.model.dtype
    if (
        checkpoint.architecture not in _PLAIN or checkpoint.pooling is not None or checkpoint.sliding_window
        or "quantization_config" in checkpoint.hf or dtype != "bfloat16" or config.cache.block_size != 16
        or config.cache.kv_cache_dtype not in ("auto", dtype)
        or config.attention.attention_backend not in ("auto", "triton")
    ):  # fmt: skip
        return frozenset()
    num_heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // num_heads
    heads = f"{num_heads} query heads, {text.get('num_key_value_heads', num_heads)} of keys, of {head_dim}"
    facts = {
        heads,
        f"{checkpoint.vocab_size} tokens",
        "layers of experts" if text.get("num_experts") else "dense layers",
    }
    return frozenset(facts | ({f"{heads}, long"} if checkpoint.max_model_len >= _LONG else set()))


def wanted(facts: frozenset[str]) -> list[dict[str, Any]]:
    """The entries for any of `facts`."""
    entries = json.loads(SPECIALIZATIONS.read_text(encoding="utf-8")) if facts else []
    return [entry for entry in entries if not facts.isdisjoint(entry["for"])]


def _mark(entries: Sequence[dict[str, Any]]) -> Path:
    """A file beside Triton's kernels that says that these are there; named after what they follow from."""
    settings = _settings()
    home = Path(settings.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    compiler = find_spec("triton")
    if compiler is None or compiler.origin is None:
        raise ModuleNotFoundError("triton is not installed")
    files = [*sorted(Path(__file__).parents[2].glob("kernels/*.py")), Path(compiler.origin).with_name("_C")]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(json.dumps([entries, states, settings], sort_keys=True).encode()).hexdigest()
    return Path(settings.get("TRITON_CACHE_DIR") or home, f"frame-{name}")


def _settings() -> dict[str, str]:
    """Triton's own variables: where its cache is, and what kernels in it are compiled for."""
    return {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}


def _compile(entries: Sequence[dict[str, Any]], mark: Path, tells: int) -> None:
    """Writes the hashes of all keys to `tells`, then compiles; of devices that the file is not for, none."""
    logging.disable(logging.INFO)
    launching = ModuleType("torch")  # named beside kernels, by what launches them: nothing is launched here
    launching.Tensor = object  # type: ignore[attr-defined]
    sys.modules["torch"] = launching
    hashed = read_triton()
    found = list[tuple[int, ...]]()
    opening = Thread(target=lambda: found.append(_capability()))
    opening.start()
    from . import compiler, specializations

    opening.join()
    if found != [_CAPABILITY]:
        return
    hashed()
    with compiler.absent_driver(0, _CAPABILITY, _SHARED_BYTES), compiler.without_lines():
        kernels = dict(map(specializations.keyed, entries))
        os.write(tells, " ".join(kernels).encode())
        os.close(tells)
        specializations.compile_all(kernels.values())
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _capability() -> tuple[int, ...]:
    """The compute capability of the first device."""
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return ()
    numbers = [ctypes.c_int() for _ in _ATTRIBUTES]
    for number, attribute in zip(numbers, _ATTRIBUTES, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return tuple(number.value for number in numbers)
