"""Every pooling family gives what transformers gives, to 1e-5, whatever a prompt is batched with."""

import pytest
import torch
from torch.nn import functional

from frame import PoolingParams
from frame.testing.pooling_checkpoints import POOLING_FAMILIES, make_pooling_checkpoint
from tests.pooling.conftest import hidden_states, logits, make_prompts, near, open_llm

CLASSIFY = [name for name, row in POOLING_FAMILIES.items() if "ForSequenceClassification" in row.architecture]
LABEL = [name for name, row in POOLING_FAMILIES.items() if "ForTokenClassification" in row.architecture]
EMBED = [name for name in POOLING_FAMILIES if name not in CLASSIFY + LABEL]


@pytest.mark.parametrize("family", EMBED)
def test_embeddings_equal_transformers(family, tmp_path):
    from transformers import AutoModel

    folder = make_pooling_checkpoint(tmp_path, family)
    prompts = make_prompts()
    states = hidden_states(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), prompts)
    place = -1 if family in ("qwen3", "gemma") else 0
    wanted = functional.normalize(torch.stack([state[place] for state in states]), dim=-1)
    llm = open_llm(folder)
    together = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    assert near(together, wanted)
    alone = [llm.embed(prompt, use_tqdm=False)[0].outputs.embedding for prompt in prompts]
    assert near(alone, together)
    tokens = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    for output, state in zip(tokens, states, strict=True):
        assert near(output.outputs.data, functional.normalize(state, dim=-1))
    llm.close()


@pytest.mark.parametrize("family", CLASSIFY)
def test_classes_equal_transformers(family, tmp_path):
    from transformers import AutoModelForSequenceClassification

    folder = make_pooling_checkpoint(tmp_path, family)
    prompts = make_prompts()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = logits(model, prompts)
    wanted = scores.sigmoid() if scores.shape[1] == 1 else scores.softmax(-1)
    llm = open_llm(folder)
    outputs = llm.classify(prompts, use_tqdm=False)
    assert near([output.outputs.probs for output in outputs], wanted)
    assert outputs[0].outputs.num_classes == scores.shape[1]
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    llm.close()


@pytest.mark.parametrize("family", LABEL)
def test_classes_of_tokens_equal_transformers(family, tmp_path):
    from transformers import AutoModelForTokenClassification

    folder = make_pooling_checkpoint(tmp_path, family)
    prompts = make_prompts()
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    llm = open_llm(folder)
    outputs = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
    raw = llm.encode(prompts, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for prompt, output, scores in zip(prompts, outputs, raw, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt["prompt_token_ids"]])).logits[0]
        assert near(scores.outputs.data, wanted)
        assert near(output.outputs.data, wanted.softmax(-1))
    llm.close()
