"""A device that is not there: its tensors have shapes and types and no memory, and say that they are on it.

Launch code runs on it as on a real one, except that nothing is launched; what the host asks for is zeros. Entering it
changes what functions of torch and Triton answer, so it is done in a process of its own. Knows no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from frame.interfaces import HostCopy, Memory, MemorySnapshot, Streams

from .compiler import absent_driver

_DEVICE_OF: Any = vars(torch._C.TensorBase)["device"].__get__
_IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__


class Pretended(TorchFunctionMode):
    """Tensors on `device` are made without memory, by torch's meta device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE_OF:
            found = func(*args)
            return self._device if found.type == "meta" else found
        if func == _IS_CUDA:
            return self._device.type == "cuda" and _DEVICE_OF(*args).type == "meta"
        quick = _QUICK.get(func)
        if quick is not None and _DEVICE_OF(args[0] if isinstance(args[0], Tensor) else args[0][0]).type == "meta":
            made = quick(*args, **(kwargs or {}))
            if made is not None:
                return made
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = self._placed(kwargs["device"])
            if func is torch.arange and kwargs["device"] == "meta":
                return _range(*args, **kwargs)
        if func is torch.Tensor.to:
            args = tuple(self._placed(one) if isinstance(one, torch.device | str) else one for one in args)
        return func(*args, **kwargs)

    def _placed(self, device: Any) -> Any:
        return "meta" if torch.device(device).type == self._device.type else device


def _range(*bounds: int, dtype: torch.dtype = torch.int64, device: Any = None, **_: Any) -> Tensor:
    """`torch.arange`, whose version for the meta device imports a compiler, which takes two seconds."""
    return torch.empty(len(range(*bounds)), dtype=dtype, device=device)


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _same(x: Tensor, **others: Any) -> Tensor | None:
    return None if others else _empty(x.shape, x)


def _scaled(x: Tensor, factor: Any) -> Tensor | None:
    return None if isinstance(factor, Tensor) else _empty(x.shape, x)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    if len({part.dtype for part in parts}) > 1:
        return None
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _empty(shape, parts[0])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    del bias
    return _empty((*x.shape[:-1], weight.shape[0]), x)


def _looked_up(ids: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    return _empty((*ids.shape, weight.shape[1]), weight)


#: What functions return whose form for the meta device is slow, or imports sympy (a second) before the first kernel;
#: None where that form is called for.
_QUICK: dict[Any, Callable[..., Any]] = {
    functional.linear: _product,
    functional.embedding: _looked_up,
    torch.empty_like: _same,
    torch.Tensor.cos: _same,
    torch.Tensor.sin: _same,
    torch.Tensor.log: _same,
    torch.Tensor.mul: _scaled,
    torch.Tensor.__mul__: _scaled,
    torch.Tensor.tolist: lambda x: torch.ones(x.shape).tolist(),  # such as scales, whose value changes no launch
    torch.outer: lambda x, y: _empty((len(x), len(y)), x),
    torch.cat: _joined,
}


class StandIn(ModuleType):
    """Stands for a module that takes seconds to import: has some attributes, and imports the module for any other."""

    def __init__(self, name: str, plain: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(plain)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module that something is imported from
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _Symbolic:
    """Stands for sympy's classes: no number is an instance."""


#: What operations of the meta device ask of torch's compiler and of sympy: to leave a function alone, whether sizes are
#: what they should be, and whether they are symbols. Here they are plain numbers.
_STAND_INS: dict[str, dict[str, Any]] = {
    "torch._dynamo": {"disable": lambda function, *_, **__: function},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_true", "guard_or_false", "guard_size_oblivious"), bool),
        "statically_known_true": bool,
        **dict.fromkeys(("has_hint", "has_guarding_hint"), lambda _: True),
        **dict.fromkeys(("size_hint", "guarding_hint_or_throw"), lambda size: size),
        "is_nested_int": lambda _: False,
        "sym_and": lambda *all_of: all(all_of),
        "sym_or": lambda *any_of: any(any_of),
        "sym_eq": lambda x, y: x == y,
    },
    "sympy": {"Basic": _Symbolic},
}


class ZeroCopy(HostCopy):
    """Zeros of the tensors' shapes and types."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._arrays = {name: torch.zeros(one.shape, dtype=one.dtype).numpy() for name, one in tensors.items()}

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, np.ndarray]:
        return self._arrays


class AbsentStreams(Streams):
    """Nothing is copied."""

    def stage(self, array: np.ndarray) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return torch.empty(array.shape, dtype=dtype, device="meta")

    def copy_out(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        return ZeroCopy(tensors)

    def synchronize(self) -> None:
        """Returns at once: no work is ever submitted."""

    def fill(self, pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        """Reads nothing."""


class AbsentMemory(Memory):
    """Reports no memory."""

    def snapshot(self) -> MemorySnapshot:
        return MemorySnapshot(total=0, free=0, held=0, peak=0)

    def kv_bytes(self, start: MemorySnapshot, utilization: float, weights_bytes: int, full_bytes: int) -> int:
        return full_bytes


def _take_away(name: str) -> None:
    """Removes the stand-in of that module, unless the module itself was imported."""
    if isinstance(sys.modules.get(name), StandIn):
        del sys.modules[name]


@contextmanager
def absent_cuda(index: int, properties: Any) -> Iterator[None]:
    """While inside, CUDA device `index` seems to be there, and tensors on it have no memory.

    `properties` are torch's of the device, of which this reads name, major, minor and shared_memory_per_block_optin.
    """
    capability = properties.major, properties.minor
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: index,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as undo:
        import_module("torch.fx.experimental._config")  # which a module that is stood in for would have brought
        for name, plain in _STAND_INS.items():
            if name not in sys.modules:
                sys.modules[name] = StandIn(name, plain)
                undo.callback(_take_away, name)
        for name, answer in answers.items():
            undo.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
            setattr(torch.cuda, name, answer)
        undo.enter_context(absent_driver(capability, properties.shared_memory_per_block_optin))
        undo.enter_context(Pretended(torch.device("cuda", index)))
        yield
