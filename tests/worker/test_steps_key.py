"""Starts whose workers launch the same kernels have the same key, whatever their folders are called."""

import json
import shutil

import pytest

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.worker.start.steps_key import steps_key
from frame.interfaces import Mesh, Placement
from frame.testing.checkpoints import make_checkpoint


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "model", "qwen3")


def key(folder, **settings):
    config = from_flat({"model": str(folder), "skip_tokenizer_init": True, **settings})
    return steps_key(config, read_checkpoint(config), Placement(mesh=Mesh()))


def test_a_copy_of_a_model_has_the_steps_of_the_model(folder, tmp_path):
    """Such as the next snapshot of a model that is fetched, whose config.json is as it was."""
    assert key(shutil.copytree(folder, tmp_path / "copy"), served_model_name=["another"]) == key(folder)


def test_another_file_or_setting_has_other_steps(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    found = {key(folder), key(folder, max_num_seqs=7), key(folder, hf_overrides={"rms_norm_eps": 0.5})}
    (copy / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert len(found | {key(copy)}) == 4
