"""Compiles the kernels that launch code launches, for a chip that is not there: nothing runs.

Tensors have shapes and types and no memory, and say that they are on a CUDA device. Triton then chooses signature,
constants and options as it would for a launch, and stops after the compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

DEVICE = torch.device("cuda", 0)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_DEVICE_OF = torch.Tensor.device.__get__
#: Instructions of numbers, in none of which R1, the stack pointer, has a place.
_ARITHMETIC = "F2FP|F2F|F2I|I2F|FADD|FMUL|FFMA|FMNMX|FSETP|HADD2|HMUL2|HFMA2|MUFU|PRMT|LOP3"


@dataclass(frozen=True)
class Chip:
    """What launch code asks of a device."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @property
    def target(self) -> GPUTarget:
        """The chip for Triton's compiler."""
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)


A100 = Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10)
H200 = Chip("NVIDIA H200", (9, 0), 132, 227 << 10)
B200 = Chip("NVIDIA B200", (10, 0), 148, 227 << 10)


@dataclass(frozen=True)
class Build:
    """A compiled kernel: what it needs, the matrix and copy instructions in it.

    `spills` are accesses to memory for want of registers, `size` is the number of its instructions, `dead` that of
    branches that are never taken and not empty, `strays` that of instructions which compute with the stack pointer.
    """

    name: str
    registers: int
    spills: int
    shared_bytes: int
    instructions: frozenset[str]
    size: int
    dead: int
    strays: int


class _Pretended(TorchFunctionMode):
    """Tensors on DEVICE are made without memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE_OF:
            return DEVICE
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def pretending(chip: Chip, *, compiles: bool = True) -> Iterator[list[tuple[str, Any]]]:
    """While inside, launches for `chip` compile and do not run; yields the names and what Triton made of them."""
    index = chip.target.arch
    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": chip.shared_bytes})
    fake = SimpleNamespace(
        get_current_device=lambda: index,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: chip.target,
        utils=utils,
    )
    made: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options) if compiles else None
        made.append((self._fn_name.removeprefix("frame.kernels."), kernel))
        return kernel

    properties = SimpleNamespace(multi_processor_count=chip.multiprocessors)
    with (
        patch.object(driver, "_active", fake),
        patch.object(JITFunction, "run", compile_only),
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.current_device", lambda: 0),
        patch("torch.cuda.is_current_stream_capturing", lambda: False),
        patch("torch.cuda.get_device_capability", lambda *_: chip.capability),
        patch("torch.cuda.get_device_properties", lambda *_: properties),
        patch("torch.cuda.get_device_name", lambda *_: chip.name),
        _Pretended(),
    ):
        forget_the_chip()
        try:
            yield made
        finally:
            forget_the_chip()


def forget_the_chip() -> None:
    """Empties what launch code remembers of a device."""
    from frame.kernels import chain, coded_rows, experts, linear_invariant

    known = chain.chained, experts.chip_of, linear_invariant.num_multiprocessors, coded_rows.counters
    for remembered in known:
        remembered.cache_clear()


def compile_all(chip: Chip, launch: Callable[[], Any]) -> list[Build]:
    """Every kernel that `launch` launches, in order, each once."""
    with pretending(chip) as made:
        launch()
    return [_examined(name, kernel) for name, kernel in dict.fromkeys(made)]


def launched(chip: Chip, launch: Callable[[], Any]) -> set[str]:
    """The names of the kernels that `launch` launches."""
    with pretending(chip, compiles=False) as made:
        launch()
    return {name for name, _ in made}


@cache
def _examined(name: str, kernel: Any) -> Build:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("-res-usage", file.name)
        code = _tool("-sass", file.name)
    registers = re.search(r"\bREG:(\d+)", usage)
    if registers is None:
        raise ValueError(f"cuobjdump tells no registers of {name}: {usage}")
    found = frozenset(re.findall(r"\b(HGMMA|QGMMA|HMMA|IMMA|DMMA|UTC\w*MMA|UTMALDG|LDGSTS)\b", code))
    spills, size = (
        len(re.findall(r"\b(?:STL|LDL)\b", code)),
        len(re.findall(r"^ +/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
    )
    dead = num_dead_branches(kernel.asm["ttgir"])
    strays = len(re.findall(rf"\b(?:{_ARITHMETIC})\b[^;]*[ ,|-]R1\b(?!\])", code))
    return Build(name, int(registers[1]), spills, kernel.metadata.shared, found, size, dead, strays)


def num_dead_branches(code: str) -> int:
    """How many branches by a constant Triton's code has whose other side is not empty."""
    lines, found = code.splitlines(), 0
    for number, line in enumerate(lines):
        place = number
        if (branch := re.match(r"( *)(?:%.* = )?scf\.if %(true|false)\b", line)) is None:
            continue
        if branch[2] == "true":  # the side that is never taken, if there is one
            place = next(i for i in range(place + 1, len(lines)) if lines[i].startswith(branch[1] + "}"))
            if "else" not in lines[place]:
                continue
        found += not lines[place + 1].lstrip().startswith(("}", "scf.yield"))
    return found


def _tool(option: str, file: str) -> str:
    return subprocess.run([TOOLS / "cuobjdump", option, file], capture_output=True, text=True, check=True).stdout
