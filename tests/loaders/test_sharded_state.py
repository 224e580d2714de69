"""Weights that each rank stored as it holds them are served as before, and for another division not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from frame.core.config.flat import from_flat
from frame.core.plugin_host.model_sources import fetch_model
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, running
from tests.gguf.files import write_gguf
from tests.gguf.test_models import FOURS, MOE


def served(folder, path=None, count=8, **settings):
    """Greedy tokens; the state is saved to `path` if there is one."""
    save = settings.pop("save", {})
    config = fetch_model(from_flat({**SMALL, "model": str(folder), **settings}))
    with running(config, Registry.load()) as engine:
        if path is not None:
            engine.call("worker", {"method": "save_sharded_state", "path": str(path), **save})
        return greedy(engine, prompts(512), count)


CASES = {
    "tied": ("llama-tied", {}, {}),
    "states": ("falcon-h1", {}, {}),
    "two ranks": ("qwen3", {}, {"tensor_parallel_size": 2}),
    "quantised online": ("qwen3", {}, {"quantization": "int4"}),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_tokens_stay_the_same(case, tmp_path):
    family, overrides, settings = CASES[case]
    plain = make_checkpoint(tmp_path / "plain", family, **overrides)
    want = served(plain, tmp_path / "state", **settings)
    (plain / "model.safetensors").unlink()
    assert served(tmp_path / "state", **settings) == want
    assert served(tmp_path / "state", load_format="sharded_state", **settings) == want


def test_codes_of_gguf_files_are_stored_and_not_their_values(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "qwen3-moe", **MOE)
    file = write_gguf(plain, tmp_path / "m.gguf", FOURS)
    want = served(file, tmp_path / "state", download_dir=str(tmp_path / "cache"))
    assert served(tmp_path / "state") == want
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "state" / "model-rank-0-part-0.safetensors").values()}
    assert torch.int32 in kinds  # eight codes each


def test_files_are_no_larger_than_asked(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    want = served(plain, tmp_path / "state", save={"max_size": 40_000, "pattern": "r{rank}p{part}.safetensors"})
    files = sorted((tmp_path / "state").glob("r0p*.safetensors"))
    assert len(files) > 3
    names = [name for file in files for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    assert len(names) == len(set(names))
    assert served(tmp_path / "state") == want


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    served(make_checkpoint(folder / "plain", "qwen3"), folder / "state", 1)
    return folder / "state"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel_size": 2}, "holds weights for tensor_parallel_size 1, and the engine has 2"),
        ({"quantization": "int8"}, "holds weights for quantization 'none', and the engine has 'int8"),
        ({"dtype": "bfloat16"}, "holds weights for dtype 'float32', and the engine has 'bfloat16'"),
    ],
)
def test_another_division_is_refused(settings, sentence, state):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        served(state, **settings)
    text = str(caught.value)
    assert str(state) in text
    assert sentence in text
    assert "save them anew with save_sharded_state" in text


def test_damaged_states_are_named(state, tmp_path):
    def copied(name):
        folder = tmp_path / name
        folder.mkdir()
        for file in state.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder, folder / "model-rank-0-part-0.safetensors"

    folder, file = copied("missing")
    file.unlink()
    with pytest.raises(ValueError, match=r"lacks model-rank-0-part-0\.safetensors, the weights of rank 0"):
        served(folder)
    folder, file = copied("truncated")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is corrupt or truncated"):
        served(folder)
    folder, file = copied("changed")
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, name: tensors[name][1:].contiguous()}, file)
    with pytest.raises(ValueError, match=r"does not fit Qwen3ForCausalLM: .* is torch\.float32"):
        served(folder)
    folder, _ = copied("facts")
    (folder / "sharded_state.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say what was stored"):
        served(folder)


def test_a_state_never_replaces_its_checkpoint(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    with pytest.raises((ValueError, RuntimeError), match="name another folder"):
        served(plain, plain)
