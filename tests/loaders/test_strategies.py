"""Files of weights give the same tokens however they are read; pickles are refused with what converts them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from frame.interfaces import LoaderSetup
from frame.plugins.loaders.safetensors import SafetensorsLoader
from frame.plugins.loaders.strategies import Prefetch, Whole, touch
from frame.testing.checkpoints import make_checkpoint
from tests.loaders.test_sharded_state import served

PACKAGES = {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai_model_streamer", "tensorizer": "tensorizer"}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """(checkpoint in several files, its tokens)."""
    folder = make_checkpoint(tmp_path_factory.mktemp("sharded") / "plain", "qwen3", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder, served(folder)


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_tokens_stay_the_same(strategy, sharded):
    folder, want = sharded
    assert served(folder, safetensors_load_strategy=strategy) == want


def test_eager_reads_each_file_once_and_keeps_two(sharded, monkeypatch):
    folder, _ = sharded
    loader = SafetensorsLoader(LoaderSetup(folder, strategy="eager"))
    read = []

    def counted(path):
        read.append(path)
        return load_file(path)

    loader._strategy = strategy = Whole(counted)
    tensors = list(loader.tensors())
    assert read == []
    for tensor in tensors:
        rows = (slice(0, 1),)
        assert torch.equal(tensor.read(rows), tensor.read()[rows])
        assert len(strategy._kept) <= 2
    assert sorted(read) == sorted(set(read))
    assert read


def test_prefetch_reads_all_files_once(sharded, monkeypatch):
    folder, _ = sharded
    touched = []
    monkeypatch.setattr("frame.plugins.loaders.strategies.touch", touched.append)
    loader = SafetensorsLoader(LoaderSetup(folder, strategy="prefetch"))
    assert isinstance(loader._strategy, Prefetch)
    tensors = list(loader.tensors())
    assert touched == []
    for tensor in tensors:
        tensor.read()
    files = sorted(folder.glob("*.safetensors"))
    for _ in range(100):
        if len(touched) == len(files):
            break
        torch.rand(100_000).sort()
    assert sorted(touched) == files
    assert touch(files[0]) == files[0].stat().st_size


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_read_the_same(name, sharded, tmp_path):
    folder, want = sharded
    if importlib.util.find_spec(PACKAGES[name]) is None:
        with pytest.raises(ValueError, match=r"is not installed: pip install") as caught:
            served(folder, load_format=name)
        assert f"load format '{name}' cannot read {folder}" in str(caught.value)
        return
    if name == "tensorizer":
        folder = write_tensorizer(folder, tmp_path)
    assert served(folder, load_format=name) == want


def write_tensorizer(folder, target):
    from tensorizer import TensorSerializer

    weights = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    serializer = TensorSerializer(str(target / "model.tensors"))
    serializer.write_state_dict(weights)
    serializer.close()
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.some(1)
@pytest.mark.parametrize("load_format", ["auto", "pt", "npcache"])
def test_pickles_are_refused_with_the_command_that_converts_them(load_format, tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=1)
    want = served(plain)
    torch.save(load_file(plain / "model.safetensors"), plain / "pytorch_model.bin")
    (plain / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"\(pytorch_model\.bin\), which frame never opens") as caught:
        served(plain, load_format=load_format)
    command = re.search("`(.*?)`", str(caught.value))[1]
    if load_format == "pt":
        subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True, capture_output=True, timeout=300)
        assert served(tmp_path / "plain-safetensors") == want
