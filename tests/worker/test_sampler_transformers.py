"""The sampler against transformers: greedy tokens, log-probabilities and processed scores of a tiny random model."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker.sampling import add, make_sampler, new_request, sample

pytestmark = pytest.mark.product

VOCAB = 96
PROMPT = (5, 17, 3, 80, 17)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(model, **options):
    """(drawn ids [T], raw logits [T, V], processed scores [T, V]) of greedy generation."""
    prompt = torch.tensor([PROMPT])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=16,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **options,
    )
    return out.sequences[0, len(PROMPT) :], torch.cat(out.logits), torch.cat(out.scores)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}], ids=str)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_greedy_generation_and_its_logprobs_are_equal(model, options, mode):
    tokens, logits, scores = generate(model, **options)
    sampler = make_sampler(vocab_size=VOCAB, logprobs_mode=mode)
    add(sampler, new_request(0, PROMPT, temperature=0.0, logprobs=-1, **options))
    expected = (logits if mode == "raw_logprobs" else scores).log_softmax(-1)
    for step, token in enumerate(tokens.tolist()):
        arrays, rows = sample(sampler, logits[step : step + 1], [0], [len(PROMPT) + step])
        assert arrays["token_ids"].tolist() == [token]
        ids = rows[0].token_ids[0].astype(np.int64)
        np.testing.assert_allclose(rows[0].logprobs[0], expected[step, ids].numpy(), rtol=1e-6, atol=1e-6)
        assert rows[0].ranks[0] == (expected[step] > expected[step, token]).sum() + 1


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 9}, [TopKLogitsWarper(9)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        (
            {"repetition_penalty": 1.3, "temperature": 1.6, "min_p": 0.05, "top_k": 40, "top_p": 0.9},
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(1.6),
                MinPLogitsWarper(0.05),
                TopKLogitsWarper(40),
                TopPLogitsWarper(0.9),
            ],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_filters_keep_what_transformers_keeps(params, warpers):
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    expected = logits.clone()
    for warper in warpers:
        expected = warper(torch.tensor([PROMPT]).expand(20, -1), expected)
    sampler = make_sampler(vocab_size=VOCAB, max_slots=20, logprobs_mode="processed_logits")
    add(sampler, *(new_request(slot, PROMPT, logprobs=-1, **params) for slot in range(20)))
    _, rows = sample(sampler, logits, range(20), [len(PROMPT)] * 20)
    for row, found in rows.items():
        ids = found.token_ids[0].astype(np.int64)
        np.testing.assert_allclose(found.logprobs[0], expected[row, ids].numpy(), rtol=1e-6)
