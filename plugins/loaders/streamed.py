"""Loaders of packages that read files in ways of their own. Each is used when `--load-format` names it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from frame.interfaces import LazyTensor, LoaderSetup, WeightLoader

from .safetensors import SafetensorsLoader
from .strategies import Whole


def missing(module: str, package: str, named: bool) -> str | None:
    """Why a loader of this package cannot be used here, or None."""
    if not named:
        return "it reads only when asked for by name"
    if importlib.util.find_spec(module) is None:
        return f"{package} is not installed: pip install {package}"
    return None


class StreamedLoader(SafetensorsLoader):
    """Safetensors files, each read whole by another package when the first of its tensors is needed."""

    module: ClassVar[str]
    package: ClassVar[str]

    def __init__(self, setup: LoaderSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._strategy = Whole(self.read_whole)

    def supports(self, folder: Path) -> str | None:
        return missing(self.module, self.package, self.setup.named) or super().supports(folder)

    @staticmethod
    def read_whole(path: Path) -> Mapping[str, Tensor]:
        """The tensors of a file."""
        raise NotImplementedError


class FastSafetensorsLoader(StreamedLoader):
    """Read by fastsafetensors, with many threads."""

    module, package = "fastsafetensors", "fastsafetensors"

    @staticmethod
    def read_whole(path: Path) -> Mapping[str, Tensor]:
        from fastsafetensors import fastsafe_open

        with fastsafe_open([str(path)], nogds=True, device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class RunaiLoader(StreamedLoader):
    """Read by the Run:ai model streamer, with many requests at a time."""

    module, package = "runai_model_streamer", "runai-model-streamer"

    @staticmethod
    def read_whole(path: Path) -> Mapping[str, Tensor]:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


class ReadTensor(LazyTensor):
    """A tensor that is in memory."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.shape, self.dtype, self._tensor = name, tuple(tensor.shape), tensor.dtype, tensor

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        return self._tensor[index] if index else self._tensor


class TensorizerLoader(WeightLoader):
    """`model.tensors`, as tensorizer writes a state_dict; it is read whole, and its hashes are compared."""

    _FILE = "model.tensors"

    def supports(self, folder: Path) -> str | None:
        if reason := missing("tensorizer", "tensorizer", self.setup.named):
            return reason
        return None if (folder / self._FILE).is_file() else f"there is no {self._FILE}"

    def tensors(self) -> Iterator[LazyTensor]:
        if reason := self.supports(self.folder):
            raise ValueError(f"cannot read {self.folder}: {reason}")
        from tensorizer import TensorDeserializer

        path = self.folder / self._FILE
        try:
            with TensorDeserializer(str(path), device="cpu", verify_hash=True) as found:
                tensors = {name: found[name].detach() for name in found.keys()}  # noqa: SIM118
        except Exception as error:  # the package raises whatever it meets
            raise ValueError(f"{path} is corrupt or truncated: {' '.join(str(error).split())[:200]}") from None
        for name, tensor in tensors.items():
            yield ReadTensor(name, tensor)
