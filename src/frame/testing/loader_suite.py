"""The contract of weight loaders: each tensor is read once, lazily and exactly; a broken file gives a clear error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.loader import LazyTensor, WeightLoader

from .engines import SMALL, greedy, prompts, running
from .plugin_suite import PluginSuite, reason_or_none
from .tiny import write_tiny


class WeightLoaderSuite(PluginSuite):
    """The contract of `frame.interfaces.WeightLoader`.

        class TestMine(WeightLoaderSuite):
            plugin = "mine"                              # or target = "package.module:Class"

            def write(self, folder, tensors):            # a checkpoint in the loader's own format
                ...

    Without `write`, safetensors files are written. Loaders that make values (`complete` False) are asked to fill.
    """

    kind = "loader"

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Writes `tensors` into the empty folder `folder`, in more than one file when the format can."""
        from safetensors.torch import save_file

        names = list(tensors)
        for number, part in enumerate((names[::2], names[1::2])):
            save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")

    def damage(self, folder: Path) -> Path:
        """Cuts the largest file in half and returns it."""
        path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(path, path.stat().st_size // 2)
        return path

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that tests write: several shapes and dtypes."""
        generator = torch.Generator().manual_seed(0)
        shapes = {"a.weight": (64, 48), "a.bias": (64,), "b.weight": (3, 5, 7), "c.weight": (200, 32), "d": (1,)}
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        made["c.weight"] = made["c.weight"].to(torch.bfloat16)
        made["b.weight"] = made["b.weight"].to(torch.float16)
        return made

    def loader_config(self) -> FrameConfig:
        """A configuration that chooses this loader."""
        return self.config(load_format=self.name)

    def loader(self, folder: Path) -> WeightLoader:
        """A new loader of `folder`."""
        made = self.make(config=self.loader_config(), folder=folder, named=True)
        assert isinstance(made, WeightLoader), f"{type(made).__name__} does not derive from WeightLoader"
        return made

    def written(self) -> tuple[WeightLoader, dict[str, Tensor]]:
        """A loader over written tensors; skips loaders that read nothing, and folders that it does not support."""
        tensors = self.tensors()
        self.write(self.folder, tensors)
        loader = self.loader(self.folder)
        if not loader.complete:
            pytest.skip("it makes values and reads no file")
        reason = loader.supports(self.folder)
        if reason is not None:
            pytest.skip(f"{reason}; override write() for the loader's own format")
        return loader, tensors

    def test_supports_gives_reasons(self) -> None:
        loader = self.loader(self.folder)
        empty, other = self.scratch("empty"), self.scratch("other")
        (other / "notes.txt").write_text("no weights here")
        for folder in (empty, other, self.folder / "not-there"):
            reason_or_none(loader.supports(folder), "supports")

    def test_every_tensor_comes_once_with_its_facts(self) -> None:
        loader, tensors = self.written()
        found = list(loader.tensors())
        names = [tensor.name for tensor in found]
        assert sorted(names) == sorted(tensors), f"tensors {sorted(set(names) ^ set(tensors))} are missing or extra"
        for tensor in found:
            assert isinstance(tensor, LazyTensor)
            want = tensors[tensor.name]
            assert tuple(tensor.shape) == tuple(want.shape), f"{tensor.name} has shape {tensor.shape}"
            assert tensor.dtype == want.dtype, f"{tensor.name} has dtype {tensor.dtype}, was written as {want.dtype}"
        assert [tensor.name for tensor in loader.tensors()] == names, "the order changes from call to call"

    def test_tensors_are_read_exactly(self) -> None:
        loader, tensors = self.written()
        for tensor in loader.tensors():
            got = tensor.read()
            assert got.device.type == "cpu", f"{tensor.name} was read to {got.device}"
            assert torch.equal(got, tensors[tensor.name]), f"{tensor.name} was read wrongly"
            assert torch.equal(tensor.read(), got), f"{tensor.name} differs when read again"

    def test_nothing_is_read_before_it_is_asked_for(self) -> None:
        """A rank reads its share only, and memory never holds a checkpoint twice."""
        loader, tensors = self.written()
        listed = {tensor.name: tensor for tensor in loader.tensors()}
        name, want = "c.weight", tensors["c.weight"]
        values = want.view(torch.uint8).numpy().tobytes()
        for path in (path for path in self.folder.rglob("*") if path.is_file()):
            place = path.read_bytes().find(values)
            if place >= 0:
                with path.open("r+b") as file:
                    file.seek(place)
                    file.write(bytes(len(values)))
                break
        else:
            pytest.skip("no file holds the values as they are")
        found = listed[name].read()
        assert not found.any(), f"{name} has the values that the file had when tensors were listed: they were read then"

    def test_slices_are_read_as_of_the_whole(self) -> None:
        loader, tensors = self.written()
        slices = [(slice(0, 1),), (slice(10, 20),), (slice(None), slice(3, 5)), (slice(2, None), slice(0, 2))]
        for tensor in loader.tensors():
            whole = tensors[tensor.name]
            for index in slices:
                if len(index) <= whole.dim():
                    assert torch.equal(tensor.read(index), whole[index]), f"{tensor.name}{list(index)} is wrong"

    def test_a_broken_file_is_named(self) -> None:
        self.written()
        path = self.damage(self.folder)
        with pytest.raises(ValueError, match=path.name.replace(".", r"\.")):
            self.read_all(self.folder)

    def read_all(self, folder: Path) -> dict[str, Tensor]:
        """Every tensor of a folder, by a new loader."""
        return {tensor.name: tensor.read() for tensor in self.loader(folder).tensors()}

    def test_a_folder_without_weights_is_an_error(self) -> None:
        loader = self.loader(self.scratch("empty"))
        if not loader.complete:
            pytest.skip("it makes values and reads no file")
        with pytest.raises(ValueError, match="empty"):
            list(loader.tensors())

    def test_values_that_it_makes_are_usable_and_repeat(self) -> None:
        loader = self.loader(self.folder)
        if loader.complete:
            pytest.skip("it reads every value from files")
        for name, shape in (("a.weight", (32, 16)), ("a.norm.weight", (16,)), ("a.bias", (16,))):
            first, second = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
            loader.fill(name, first, shape)
            self.loader(self.folder).fill(name, second, shape)
            assert torch.isfinite(first).all(), f"{name} was not filled with numbers"
            assert torch.equal(first, second), f"{name} gets other values the next time"
            for index in ((slice(4, 12),), (slice(None),) * (len(shape) - 1) + (slice(8, 16),)):
                part = torch.full_like(first[index], float("nan"))
                loader.fill(name, part, shape, index)
                assert torch.equal(part, first[index]), f"{name}{list(index)} is not that part of the whole"

    def test_an_engine_serves_what_it_loads(self) -> None:
        folder = self.scratch("model")
        write_tiny(folder, "LlamaForCausalLM")
        loader = self.loader(folder)
        if loader.complete:
            from safetensors.torch import load_file

            tensors = load_file(folder / "model.safetensors")
            (folder / "model.safetensors").unlink()
            self.write(folder, tensors)
        reason = loader.supports(folder)
        if reason is not None:
            pytest.skip(reason)
        config = self.config(**{**SMALL, "model": str(folder), "load_format": self.name})
        with running(config, self.registry()) as engine:
            assert all(len(tokens) == 12 for tokens in greedy(engine, prompts(512)))
