"""`LLM.embed`, `classify`, `score`, `encode` and `reward`: parameters, pairs, chunks, caches and refusals."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from frame import LLM, PoolingParams, SamplingParams
from frame.core.config.errors import ConfigError
from frame.testing.checkpoints import make_checkpoint
from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from tests.pooling.conftest import hidden_states, make_prompts, near, open_llm


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A tiny causal model with the files of a sentence-transformers embedding model (as Qwen3-Embedding's)."""
    folder = make_checkpoint(tmp_path_factory.mktemp("decoder"), "qwen3", tokenizer=True)
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Normalize")]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.fixture(scope="module")
def states(decoder):
    from transformers import AutoModel

    return hidden_states(AutoModel.from_pretrained(decoder, dtype=torch.float32).eval(), make_prompts())


def rows(outputs):
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("pooler", ["last", "mean", "cls"])
def test_decoders_in_chunks_and_from_the_prefix_cache(decoder, states, pooler):
    pools = {"last": lambda state: state[-1], "mean": lambda state: state.mean(0), "cls": lambda state: state[0]}
    wanted = functional.normalize(torch.stack([pools[pooler](state) for state in states]), dim=-1)
    llm = open_llm(decoder, pooling_type=pooler, max_num_batched_tokens=13, max_num_seqs=4)
    for _ in range(2):
        assert near(rows(llm.embed(make_prompts(), use_tqdm=False)), wanted)
    hits = llm.llm_engine.core.stats().prefix_hits
    assert (hits > 0) == (pooler == "last")  # the others need the states of every token
    llm.close()


def test_preempted_prompts_start_over(decoder, states):
    wanted = functional.normalize(torch.stack([state.mean(0) for state in states]), dim=-1)
    tight = {
        "num_gpu_blocks_override": 20,
        "block_size": 8,
        "max_num_batched_tokens": 24,
        "max_num_partial_prefills": 4,
    }
    llm = open_llm(decoder, pooling_type="MEAN", **tight)
    assert near(rows(llm.embed(make_prompts(), use_tqdm=False)), wanted)
    llm.close()


def test_dimensions_and_normalisation_are_each_requests_own(decoder, states):
    llm = open_llm(decoder, hf_overrides={"is_matryoshka": True}, pooler_config={"pooling_type": "LAST"})
    asked = [PoolingParams(), PoolingParams(dimensions=8), PoolingParams(normalize=False), PoolingParams()]
    found = rows(llm.embed(make_prompts()[:4], pooling_params=asked, use_tqdm=False))
    last = [state[-1] for state in states[:4]]
    assert near(found[0], functional.normalize(last[0], dim=0))
    assert near(found[1], functional.normalize(last[1][:8], dim=0))
    assert near(found[2], last[2], 1e-4)
    with pytest.raises(ValueError, match="dimensions must be one of 1 to 64, got 65"):
        llm.embed([[5]], pooling_params=PoolingParams(dimensions=65))
    with pytest.raises(ValueError, match="2 pooling params were given for 1 prompts"):
        llm.embed({"prompt_token_ids": [5]}, pooling_params=asked[:2])
    llm.close()


def test_pairs_equal_transformers(tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_pooling_checkpoint(tmp_path, "bert-reranker", tokenizer=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    query, documents = "who?", ["a cat", "a dog that barks", "nobody at all"]

    def wanted(first, second):
        encoded = tokenizer(first, second, return_tensors="pt", return_token_type_ids=True)
        assert encoded["token_type_ids"].sum() > 0
        with torch.inference_mode():
            return model(**encoded).logits.sigmoid()[0, 0]

    llm = LLM(str(folder), num_threads=1, dtype="float32")
    scores = [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]
    assert near(scores, [wanted(query, one) for one in documents])
    pairwise = llm.score(documents, documents[::-1], use_tqdm=False)
    expected = [wanted(one, other) for one, other in zip(documents, documents[::-1], strict=True)]
    assert near([output.outputs.score for output in pairwise], expected)
    raw = llm.score(query, documents[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert near(1 / (1 + np.exp(-raw[0].outputs.score)), scores[0])
    with pytest.raises(ValueError, match="2 texts cannot be scored against 3"):
        llm.score(documents[:2], documents)
    with pytest.raises(ValueError, match="cannot be scored"):
        llm.score(documents, query)
    with pytest.raises(ValueError, match="it can: classify, score"):
        llm.embed("x")
    with pytest.raises(ValueError, match="the model pools, so it cannot do 'generate'"):
        llm.generate("x", SamplingParams(max_tokens=2))
    cut = llm.score("q" * 200, "d" * 20, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(cut[0].prompt_token_ids) == 128
    llm.close()


def test_rewards_of_every_token_and_of_steps(tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = make_pooling_checkpoint(tmp_path / "classes", "qwen2-reranker")
    prompts = make_prompts((20, 7))
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    llm = open_llm(folder, max_num_batched_tokens=8)
    outputs = llm.reward(prompts, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for output, state in zip(outputs, hidden_states(model.model, prompts), strict=True):
        assert near(output.outputs.data, functional.linear(state, model.score.weight.data), 1e-4)
    llm.close()
    folder = make_checkpoint(tmp_path / "steps", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in prompts:
        prompt["prompt_token_ids"][4] = prompt["prompt_token_ids"][-1] = 9
    pooler = {"pooling_type": "STEP", "step_tag_id": 9, "returned_token_ids": [30, 31]}
    llm = open_llm(folder, runner="pooling", convert="none", pooler_config=pooler)
    outputs = llm.reward(prompts, use_tqdm=False)
    for output, state, prompt in zip(outputs, hidden_states(model.model, prompts), prompts, strict=True):
        places = [i for i, token in enumerate(prompt["prompt_token_ids"]) if token == 9]
        assert near(output.outputs.data, functional.linear(state[places], model.lm_head.weight.data)[:, [30, 31]], 1e-4)
    llm.close()


def test_budgets_and_refusals(tmp_path, decoder):
    folder = make_pooling_checkpoint(tmp_path, "bert", tokenizer=True)
    llm = LLM(str(folder), num_threads=1, max_num_batched_tokens=32)
    with pytest.raises(ValueError, match="at most max_num_batched_tokens 32 fit in a step"):
        llm.embed({"prompt_token_ids": [5] * 40})
    assert len(llm.embed([[5] * 32, [6] * 3], use_tqdm=False)) == 2
    with pytest.raises(ValueError, match="use_activation has no meaning for task 'embed'"):
        llm.embed("x", pooling_params=PoolingParams(use_activation=True))
    llm.close()
    with pytest.raises(ValueError, match="has no output head, so it cannot classify"):
        LLM(str(folder), convert="classify")
    with pytest.raises(ConfigError, match="needs runner 'pooling'"):
        LLM(str(folder), runner="generate", convert="embed")
    generating = LLM(str(decoder), runner="generate", num_threads=1)
    with pytest.raises(ValueError, match="the model generates text, so it cannot do 'embed'"):
        generating.embed("x")
    generating.close()


@pytest.mark.parametrize("method", ["embed", "classify", "reward", "encode", "score"])
def test_a_wrong_keyword_is_refused_in_the_name_of_the_called_method(decoder, method):
    with open_llm(decoder, runner="pooling") as llm:
        texts = ("a", "b") if method == "score" else ("a",)
        with pytest.raises(ValueError, match=f"^{method} has no keyword 'wrong'"):
            getattr(llm, method)(*texts, wrong=1)
