"""Greedy output equals transformers' token for token, whatever a request is batched with and however it is computed."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES

NUM_TOKENS = 20
PROMPT_LENGTHS = (60, 3, 33, 1, 17, 48)
#: Variants of Llama's positions differ in nothing that these ways of planning touch.
planned = pytest.mark.parametrize(
    "checkpoint", [name for name in FAMILIES if not name.startswith("llama-")], indirect=True, scope="module"
)


#: States cannot take back drafts, and of states alone a request needs nothing more while it grows.
keeps_tokens, grows = (
    pytest.mark.parametrize(
        "checkpoint",
        [name for name, row in FAMILIES.items() if not name.startswith("llama-") and row.states not in without],
        indirect=True,
        scope="module",
    )
    for without in (("some", "all"), ("all",))
)


def make_prompts():
    draw = random.Random(7)
    return [draw.choices(range(3, 512), k=length) for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """(folder, what transformers continues each prompt with)"""
    folder = make_checkpoint(tmp_path_factory.mktemp("greedy"), request.param)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    continuations = []
    for prompt in make_prompts():
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        continuations.append(ids[len(prompt) :])
    return folder, continuations


def make_llm(folder, **arguments):
    from frame import LLM

    # the variants that stretch with the served length equal transformers within the trained length
    arguments = {"max_model_len": 128, "num_gpu_blocks_override": 400, **arguments}
    return LLM(model=str(folder), dtype="float32", skip_tokenizer_init=True, **arguments)


def generate(llm, prompts):
    from frame import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.each_cache
def test_alone_then_together_then_from_the_prefix_cache(checkpoint):
    folder, expected = checkpoint
    llm = make_llm(folder)
    prompts = make_prompts()
    assert generate(llm, prompts[:1]) == expected[:1]
    assert generate(llm, prompts) == expected
    assert generate(llm, prompts) == expected
    assert llm.llm_engine.core.stats().prefix_hits > 0
    shared = prompts[0] + expected[0][:10]
    assert generate(llm, [shared])[0][:10] == expected[0][10:]
    llm.close()


@pytest.mark.each_cache
@planned
def test_in_chunks_and_without_prefix_cache(checkpoint):
    folder, expected = checkpoint
    llm = make_llm(folder, max_num_batched_tokens=13, max_num_seqs=4, enable_prefix_caching=False)
    assert generate(llm, make_prompts()) == expected
    llm.close()


@pytest.mark.each_cache
@grows
def test_after_preemption(checkpoint):
    folder, expected = checkpoint
    llm = make_llm(folder, num_gpu_blocks_override=24, block_size=8, max_model_len=88, enable_prefix_caching=False)
    # many short prompts that outgrow the pool together, also where a window limits what each of them keeps
    order = sorted(range(len(PROMPT_LENGTHS)), key=lambda i: PROMPT_LENGTHS[i])
    order = order[:3] * 4 + order
    prompts = make_prompts()
    assert generate(llm, [prompts[i] for i in order]) == [expected[i] for i in order]
    assert llm.llm_engine.core.stats().preemptions > 0
    llm.close()


@pytest.mark.each_cache
@pytest.mark.few_families
@keeps_tokens
def test_with_speculation(checkpoint):
    folder, expected = checkpoint
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    llm = make_llm(folder, speculative_config=speculation, max_num_batched_tokens=40, block_size=8)
    prompts = make_prompts()
    assert generate(llm, prompts) == expected
    # what was generated stands in these prompts, so drafts from there are right
    told = [(prompt + tokens[:12]) for prompt, tokens in zip(prompts, expected, strict=True)]
    repeated = [prompt + prompt[:8] for prompt in told if len(prompt) < 50]
    alone = make_llm(folder)
    assert generate(llm, repeated) == generate(alone, repeated)
    alone.close()
    assert llm.llm_engine.core.stats().num_draft_tokens > 0
    llm.close()


@pytest.mark.each_cache
@pytest.mark.few_families
@planned
def test_sync_scheduling(checkpoint):
    folder, expected = checkpoint
    llm = make_llm(folder, async_scheduling=False)
    assert generate(llm, make_prompts()) == expected
    llm.close()
