"""Reading safetensors checkpoints: single, sharded, damaged, and the kinds that are refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from frame.interfaces import LoaderSetup
from frame.plugins.loaders.safetensors import SafetensorsLoader

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.ones(2, 2, dtype=torch.bfloat16),
    "c.bias": torch.arange(5, dtype=torch.int64),
}


def loader(folder):
    return SafetensorsLoader(LoaderSetup(folder))


def write_sharded(folder):
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({k: TENSORS[k] for k in ("b.weight", "c.bias")}, folder / "model-00002-of-00002.safetensors")
    weight_map = {
        "c.bias": "model-00002-of-00002.safetensors",
        "b.weight": "model-00002-of-00002.safetensors",
        "a.weight": "model-00001-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_every_tensor_once(tmp_path, sharded):
    if sharded:
        write_sharded(tmp_path)
    else:
        save_file(TENSORS, tmp_path / "model.safetensors")
    assert loader(tmp_path).supports(tmp_path) is None
    found = list(loader(tmp_path).tensors())
    assert sorted(tensor.name for tensor in found) == sorted(TENSORS)
    for tensor in found:
        assert tensor.shape == tuple(TENSORS[tensor.name].shape)
        assert tensor.dtype == TENSORS[tensor.name].dtype
        assert torch.equal(tensor.read(), TENSORS[tensor.name])


def test_reads_only_the_slice(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    tensor = next(tensor for tensor in loader(tmp_path).tensors() if tensor.name == "a.weight")
    assert torch.equal(tensor.read((slice(1, 3), slice(0, 2))), TENSORS["a.weight"][1:3, :2])
    assert torch.equal(tensor.read((slice(1, 2),)), TENSORS["a.weight"][1:2])


def test_files_without_index_are_all_read(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert len(list(loader(tmp_path).tensors())) == 3


@pytest.mark.parametrize("kept_bytes", [0, 4, 40, -3])
def test_truncated_file_is_named(tmp_path, kept_bytes):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated"):
        list(loader(tmp_path).tensors())


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = loader(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: Too many levels of symbolic links$"):
        list(source.read_file(tmp_path / "model.safetensors"))


def test_garbage_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated"):
        list(loader(tmp_path).tensors())


def test_missing_shard_is_named(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names model-00002-of-00002\.safetensors, which is missing"):
        list(loader(tmp_path).tensors())


def test_tensor_that_the_index_misplaces_is_named(tmp_path):
    write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["d.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors that the index puts there: d\.weight"):
        list(loader(tmp_path).tensors())


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not a safetensors index"):
        list(loader(tmp_path).tensors())


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_index_cannot_name_files_elsewhere(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match=r"which is not a file name|which is missing"):
        list(loader(tmp_path).tensors())


def test_pickles_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    reason = loader(tmp_path).supports(tmp_path)
    assert "a pickle (pytorch_model.bin)" in reason
    assert "save_pretrained" in reason
    with pytest.raises(ValueError, match=r"cannot read .*: the weights are in a pickle"):
        list(loader(tmp_path).tensors())


def test_empty_folder(tmp_path):
    assert loader(tmp_path).supports(tmp_path) == "there is no .safetensors file"
