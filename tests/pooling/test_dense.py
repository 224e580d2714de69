"""Dense modules behind pooling give what sentence-transformers gives, and wrong ones are named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from frame.core.config.errors import ConfigError
from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from tests.pooling.conftest import hidden_states, make_prompts, near, open_llm

TEXTS = ["the sea is", "a", "a book is on the table"]


def write_dense(folder, number, sizes, activation="torch.nn.modules.activation.Tanh", bias=True):
    """One module as sentence-transformers stores it; returns its row of modules.json and the product."""
    path = folder / f"{number}_Dense"
    path.mkdir()
    layer = nn.Linear(*sizes, bias=bias)
    values = {"in_features": sizes[0], "out_features": sizes[1], "bias": bias, "activation_function": activation}
    (path / "config.json").write_text(json.dumps(values))
    save_file({f"linear.{name}": value.data for name, value in layer.named_parameters()}, path / "model.safetensors")
    row = {"idx": number, "name": str(number), "path": path.name, "type": "sentence_transformers.models.Dense"}
    return row, layer


def write_modules(folder, *dense):
    """modules.json and the pooling by means of a checkpoint whose vectors go through `dense` and are normalised."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = "sentence_transformers.models"
    rows = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kinds}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kinds}.Pooling"},
        *dense,
        {"idx": 9, "name": "9", "path": "9_Normalize", "type": f"{kinds}.Normalize"},
    ]
    (folder / "9_Normalize").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(rows))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    return make_pooling_checkpoint(tmp_path, "bert")


def test_two_dense_modules_then_normalised(folder):
    from transformers import AutoModel

    first, wide = write_dense(folder, 2, (64, 96))
    second, narrow = write_dense(folder, 3, (96, 24), "torch.nn.modules.linear.Identity", bias=False)
    write_modules(folder, first, second)
    prompts = make_prompts()
    states = hidden_states(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), prompts)
    with torch.inference_mode():
        wanted = narrow(torch.tanh(wide(torch.stack([state.mean(0) for state in states]))))
    llm = open_llm(folder)
    outputs = llm.embed(prompts, use_tqdm=False)
    assert near([output.outputs.embedding for output in outputs], functional.normalize(wanted, dim=-1))
    assert outputs[0].outputs.hidden_size == 24
    rows = llm.encode(prompts[:2], pooling_task="token_embed", use_tqdm=False)  # tokens are not pooled
    assert near(rows[1].outputs.data, functional.normalize(states[1], dim=-1))
    llm.close()


def test_as_sentence_transformers_embeds_texts(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = make_pooling_checkpoint(tmp_path, "bert", tokenizer=True)
    write_modules(folder, write_dense(folder, 2, (64, 40))[0])
    wanted = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    llm = open_llm(folder, skip_tokenizer_init=False)
    assert near([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)], wanted)
    llm.close()


def test_a_dense_module_that_does_not_fit_is_named(folder):
    row, _ = write_dense(folder, 2, (48, 24))
    write_modules(folder, row)
    with pytest.raises(ValueError, match="in_features 48, but what comes before gives vectors of 64 numbers"):
        open_llm(folder)
    values = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": "torch.nn.Tanh"}
    path = folder / "2_Dense" / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"must be .*'linear.weight': \(24, 64\).*, got .*\(24, 48\)"):
        open_llm(folder)
    for changes, said in (
        ({"out_features": "many"}, "out_features in .* must be a positive integer"),
        ({"activation_function": "torch.nn.Softsign"}, "no activation 'Softsign' .*; there are: Identity, Tanh"),
    ):
        path.write_text(json.dumps({**values, **changes}))
        with pytest.raises(ConfigError, match=said):
            open_llm(folder)
    file = folder / "2_Dense" / "model.safetensors"
    path.write_text(json.dumps(values))
    save_file({"linear.weight": load_file(file)["linear.weight"]}, file)
    with pytest.raises(ValueError, match=r"the weights in .*2_Dense must be"):
        open_llm(folder)


def test_a_dense_module_before_pooling_is_refused(folder):
    row, _ = write_dense(folder, 2, (64, 24))
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}, row]))
    with pytest.raises(ConfigError, match=r"modules\.json has a module Dense before Pooling; it must follow it"):
        open_llm(folder)
