"""Prompt lookup through `LLM`: settings as vLLM names them, the demo model, and what is counted."""

from __future__ import annotations

import pytest

from frame import LLM, SamplingParams
from frame.core.server.metrics import ServerMetrics
from frame.plugins.endpoints.exposition import Exposition

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
PROMPTS = ["one two three four five, one two three four five, one two", "hello"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=30)


def texts(outputs):
    return [[completion.text for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain():
    llm = LLM()
    yield [texts(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (GREEDY, SAMPLED)]
    llm.close()


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}], ids=str)
def test_texts_are_the_same_in_fewer_steps(plain, settings):
    llm = LLM(speculative_config=SPECULATION, disable_log_stats=False, **settings)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert texts(outputs) == plain[0]
    stats = llm.llm_engine.core.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.steps < 40
    metrics = [output.metrics for output in outputs]
    assert sum(one.num_accepted_tokens for one in metrics) == stats.num_accepted_tokens
    assert sum(one.num_draft_tokens for one in metrics) == stats.num_draft_tokens
    assert sum(one.num_drafts for one in metrics) == stats.num_drafts
    assert max(one.mean_acceptance_length for one in metrics) > 1
    assert texts(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)) == plain[1]
    stats = llm.llm_engine.core.stats()
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert found["frame_spec_decode_num_accepted_tokens"].value == stats.num_accepted_tokens
    assert found["frame_spec_decode_num_draft_tokens"].value == stats.num_draft_tokens
    assert found["frame_spec_decode_num_drafts"].value == stats.num_drafts
    assert sum(found["frame_spec_decode_num_accepted_tokens_per_pos"].values) == stats.num_accepted_tokens
    text = Exposition("demo", ServerMetrics().counts(), stats).encoded().decode()
    assert f'spec_decode_num_accepted_tokens_total{{engine="0",model_name="demo"}} {stats.num_accepted_tokens}' in text
    assert 'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="3"}' in text
    llm.close()
