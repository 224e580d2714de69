"""Encoders, classifiers and pooling decoders through transformers' classes give what these give alone."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from frame.testing.checkpoints import roughen
from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from tests.pooling.conftest import hidden_states, logits, make_prompts, near, open_llm

_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96, "num_labels": 3,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 130,
    "type_vocab_size": 2,
    "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip


def make_folder(folder, model_type, auto, name):
    config = AutoConfig.for_model(model_type, architectures=[name], **_SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        roughen(model, 1.0)
    model.save_pretrained(folder)
    return folder


def embeds_like(folder, place):
    prompts = make_prompts()
    states = hidden_states(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), prompts)
    llm = open_llm(folder, model_impl="transformers")
    wanted = functional.normalize(torch.stack([state[place] for state in states]), dim=-1)
    assert near([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)], wanted)
    llm.close()


def classifies_like(folder):
    prompts = make_prompts()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = logits(model, prompts)
    wanted = scores.sigmoid() if scores.shape[1] == 1 else scores.softmax(-1)
    llm = open_llm(folder, model_impl="transformers")
    assert near([output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)], wanted)
    llm.close()


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_encoders_that_frame_has_too(family, tmp_path):
    embeds_like(make_pooling_checkpoint(tmp_path, family), 0)


@pytest.mark.parametrize("family", ["bert-classes", "roberta-classes", "qwen2-reranker"])
def test_classifiers_that_frame_has_too(family, tmp_path):
    classifies_like(make_pooling_checkpoint(tmp_path, family))


def test_a_decoder_that_embeds(tmp_path):
    embeds_like(make_pooling_checkpoint(tmp_path, "qwen3"), -1)


@pytest.mark.parametrize(("model_type", "name"), [("electra", "ElectraModel"), ("distilbert", "DistilBertModel")])
def test_encoders_without_a_file(model_type, name, tmp_path):
    embeds_like(make_folder(tmp_path, model_type, AutoModel, name), 0)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("electra", "ElectraForSequenceClassification"), ("camembert", "CamembertForSequenceClassification")],
)
def test_classifiers_without_a_file(model_type, name, tmp_path):
    classifies_like(make_folder(tmp_path, model_type, AutoModelForSequenceClassification, name))
