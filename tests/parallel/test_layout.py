"""Divisions that a model does not allow are refused before anything is loaded, with the sizes that work."""

import subprocess
import sys
import time

import pytest

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.interfaces import Mesh
from frame.layout.check import check_layout
from frame.testing.checkpoints import make_checkpoint
from frame.testing.pooling_checkpoints import make_pooling_checkpoint


def check(folder, size):
    config = from_flat({"model": str(folder)})
    check_layout(config, Mesh(tensor=size), read_checkpoint(config), Registry.load())


def refused(folder, size):
    with pytest.raises(ConfigError) as raised:
        check(folder, size)
    return str(raised.value)


def test_heads_that_do_not_divide(tmp_path):
    make_checkpoint(tmp_path, "llama", num_attention_heads=8, num_key_value_heads=4)
    said = refused(tmp_path, 3)
    assert said == (
        "tensor_parallel_size 3: the attention heads of model.layers.0.self_attn: 8 cannot be split over 3 ranks; "
        "sizes that work: 1, 2, 4, 8"
    )
    check(tmp_path, 4)


def test_inner_sizes_and_experts_that_do_not_divide(tmp_path):
    make_checkpoint(
        tmp_path, "llama", hidden_size=96, num_attention_heads=12, num_key_value_heads=12, intermediate_size=80
    )
    assert refused(tmp_path, 3).startswith("tensor_parallel_size 3: the outputs of model.layers.0.mlp.gate_proj: 80 ")


def test_a_large_model_is_tried_at_once(tmp_path):
    """64 sizes of a model of 80 layers, none of which has memory."""
    import json

    make_checkpoint(tmp_path, "llama")
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes, "num_key_value_heads": 8, "head_dim": 128}))
    began = time.monotonic()
    assert refused(tmp_path, 3).endswith("sizes that work: 1, 2, 4, 8, 16, 32, 64")
    assert time.monotonic() - began < 5


def test_stages(tmp_path):
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3)

    def said(size, **settings):
        config = from_flat({"model": str(tmp_path), **settings})
        with pytest.raises(ConfigError) as raised:
            check_layout(config, Mesh(pipeline=size), read_checkpoint(config), Registry.load())
        return str(raised.value)

    assert said(4) == (
        "pipeline_parallel_size 4: 3 layers cannot be divided into 4 pipeline stages; use 3; sizes that work: 1, 2, 3"
    )
    counted = said(2, pipeline_layers=[2, 2])
    assert counted == "pipeline_layers: 2,2 counts 4 layers in all, and the model has 3"
    assert said(1, pipeline_layers=[2, 1]).endswith("set pipeline_parallel_size to 2, or leave it out")
    assert said(2, speculator="ngram").startswith(
        "pipeline_parallel_size 2: drafts of speculator 'ngram' need the whole"
    )


def test_models_that_cannot_be_divided_into_stages(tmp_path):
    make_pooling_checkpoint(tmp_path, "bert-classes")
    config = from_flat({"model": str(tmp_path)})
    with pytest.raises(ConfigError, match="model BertForSequenceClassification cannot be divided into stages; use 1"):
        check_layout(config, Mesh(pipeline=2), read_checkpoint(config), Registry.load())


_SKETCH = """
import sys
from pathlib import Path
from tests.parallel.test_layout import check
check(Path(sys.argv[1]), 2)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_what_takes_seconds_to_import_is_not_imported_for_it(tmp_path, family):
    make_checkpoint(tmp_path, family)
    found = subprocess.run([sys.executable, "-c", _SKETCH, tmp_path], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
