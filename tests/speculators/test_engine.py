"""Speculation changes nothing but the number of steps, whatever the request asks for and however steps are planned."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from frame.core.config.flat import from_flat
from frame.interfaces import LogitsProcessor, SamplingParams
from frame.offline.in_process import make_engine
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import drain, request, tokens_of
from tests.speculators.oracle import Oracle, registry

NUM_TOKENS = 18
SMALL = {"max_model_len": 96, "num_gpu_blocks_override": 200, "dtype": "float32", "block_size": 8, "num_threads": 1}
SPECULATION = {"speculator": "oracle", "num_speculative_tokens": 4}


class Steady(LogitsProcessor):
    """Forbids the newest output token; needs to know it."""

    needs_output_ids = True

    def add(self, slot, params: SamplingParams, prompt_ids, output_ids):
        self.outputs = getattr(self, "outputs", {})
        self.outputs[slot] = output_ids
        return bool((params.extra_args or {}).get("steady"))

    def remove(self, slot):
        self.outputs.pop(slot, None)

    def apply(self, logits, slots):
        assert len(set(slots)) == len(slots)
        for row, slot in enumerate(slots):
            if self.outputs[slot]:
                logits[row, self.outputs[slot][-1]] = -torch.inf
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("speculation"), "llama")


def prompts():
    draw = random.Random(3)
    return [draw.choices(range(3, 250), k=length) for length in (30, 2, 17, 9)]


def requests(**params):
    return [request(str(index), prompt, NUM_TOKENS, index, **params) for index, prompt in enumerate(prompts())]


def run(folder, made, **settings):
    """Outputs by request, and the engine's counters."""
    engine = make_engine(from_flat({"model": str(folder), **SMALL, **settings}), registry())
    try:
        return drain(engine, made), engine.stats()
    finally:
        engine.close()


def tokens(outputs):
    return {name: tokens_of(found) for name, found in outputs.items()}


def compare(folder, make, **settings):
    """Runs without and with drafts from the right answers; the counters of the second run."""
    plain, _ = run(folder, make(), **settings)
    Oracle.answers = {}
    for one in make():
        Oracle.answers.setdefault(tuple(one.prompt_ids.tolist()), []).append(tokens_of(plain[one.request_id]))
    drafted, stats = run(folder, make(), **settings, **SPECULATION)
    assert tokens(drafted) == tokens(plain)
    for name, outputs in plain.items():
        assert drafted[name][-1].finish_reason == outputs[-1].finish_reason
        assert drafted[name][-1].stop_reason == outputs[-1].stop_reason
    return plain, drafted, stats


PARAMETERS = {
    "greedy": {},
    "seeded": {"temperature": 0.9},
    "filters": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "sampled penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.7},
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 9: 4.0, 11: 4.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [4, 5, 6, 7, 8]},
    "bad words": {
        "temperature": 1.0,
        "allowed_token_ids": [4, 5, 6],
        "bad_words_token_ids": [[4, 5], [6, 6, 4], [5, 4, 6]],
    },
    "stop ids": {"temperature": 1.0, "allowed_token_ids": list(range(4, 16)), "stop_token_ids": [7]},
    "min tokens": {
        "temperature": 1.0,
        "allowed_token_ids": list(range(4, 12)),
        "stop_token_ids": [7, 9],
        "min_tokens": 9,
    },
    "deterministic": {"temperature": 0.5, "deterministic": True},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_gives_the_same_tokens(folder, name):
    _, drafted, stats = compare(folder, lambda: requests(**PARAMETERS[name]))
    assert stats.num_accepted_tokens > 5
    assert stats.num_draft_tokens > stats.num_accepted_tokens == sum(stats.num_accepted_per_place)
    assert stats.num_accepted_per_place == sorted(stats.num_accepted_per_place, reverse=True)
    told = [output for outputs in drafted.values() for output in outputs]
    assert sum(output.num_accepted for output in told) == stats.num_accepted_tokens
    assert sum(output.num_drafts for output in told) == stats.num_draft_tokens
    assert stats.generated_tokens == sum(len(output.token_ids) for output in told)
    assert any(len(output.token_ids) > 2 for output in told)


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": False},
        {"max_num_batched_tokens": 11},
        {"max_num_batched_tokens": 3, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 14, "max_model_len": 64},
        {"num_gpu_blocks_override": 14, "max_model_len": 64, "async_scheduling": False, "block_size": 4},
        {"max_model_len": 40},
        {"disable_by_batch_size": 2},
    ],
    ids=str,
)
def test_every_way_of_planning_gives_the_same_tokens(folder, settings):
    def make():
        # twice the same, so that later ones find the earlier ones' blocks
        again = [request(f"again{i}", p, NUM_TOKENS, i, temperature=0.9) for i, p in enumerate(prompts())]
        return requests(temperature=0.9) + again

    _, _, stats = compare(folder, make, **settings)
    # all of them end together, so that never fewer run
    assert (stats.num_accepted_tokens > 0) == ("disable_by_batch_size" not in settings)
    if "num_gpu_blocks_override" in settings:
        assert stats.preemptions > 0


def test_published_blocks_hold_what_was_accepted(folder):
    """A second turn on top of a drafted answer finds its blocks, and they are right."""
    engine = make_engine(from_flat({"model": str(folder), **SMALL, **SPECULATION}), registry())
    first = tokens(run(folder, requests())[0])
    Oracle.answers = {tuple(prompt): [first[str(index)]] for index, prompt in enumerate(prompts())}
    assert tokens(drain(engine, requests())) == first
    assert engine.stats().num_accepted_tokens > 0
    longer = [prompt + first[str(index)] + [5] for index, prompt in enumerate(prompts())]
    make = [request(f"b{index}", prompt, 8) for index, prompt in enumerate(longer)]
    hits = engine.stats().prefix_hits
    found = drain(engine, make)
    assert engine.stats().prefix_hits - hits == sum((len(prompt) - 2) // 8 * 8 for prompt in longer)
    engine.close()
    assert tokens(found) == tokens(run(folder, make, enable_prefix_caching=False)[0])


def test_logprobs_come_for_each_token(folder):
    plain, drafted, stats = compare(folder, lambda: requests(temperature=0.7, logprobs=2, prompt_logprobs=1))
    assert stats.num_accepted_tokens > 0
    for name, outputs in plain.items():
        for field in ("logprobs", "prompt_logprobs"):
            rows, others = (
                [getattr(one, field) for one in found if getattr(one, field) is not None]
                for found in (outputs, drafted[name])
            )
            assert sum(len(part.ranks) for part in others) == sum(len(part.ranks) for part in rows)
            for part in ("token_ids", "ranks", "logprobs"):
                wanted = np.concatenate([getattr(one, part) for one in rows])
                found = np.concatenate([getattr(one, part) for one in others])
                np.testing.assert_allclose(found, wanted, atol=1e-5)
        for output in drafted[name]:
            assert len(output.logprobs.ranks) == len(output.token_ids)


def test_a_request_with_a_processor_draws_alone(folder):
    def make():
        steady = [request(f"s{i}", p, NUM_TOKENS, i, extra_args={"steady": True}) for i, p in enumerate(prompts())]
        return requests() + steady

    _, drafted, stats = compare(folder, make, logits_processors=[Steady])
    assert stats.num_accepted_tokens > 0
    assert all(len(output.token_ids) == 1 for i in range(4) for output in drafted[f"s{i}"])


def test_few_steps_when_the_drafts_hold(folder):
    plain, _ = run(folder, requests())
    _, _, stats = compare(folder, requests)
    assert stats.steps < 0.75 * max(len(outputs) for outputs in plain.values())
