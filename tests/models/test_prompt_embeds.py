"""Embeddings in the place of tokens: those of ids give the tokens of the ids, however they are computed."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from frame.core.config.flat import from_flat
from frame.core.front.prompts import parse_prompt
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, request, running
from frame.testing.thread_executor import with_threads

LENGTHS = (60, 3, 33, 1, 17, 48)
#: Learned positions, embeddings that are scaled, embeddings that are narrower than the states, states besides keys.
FAMILIES = ("llama", "gemma2", "gpt2", "opt", "mamba2")


def make_prompts():
    draw = random.Random(7)
    return [draw.choices(range(3, 512), k=length) for length in LENGTHS]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("embeds"), request.param)
    embed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_input_embeddings()
    return folder, lambda ids: embed(torch.tensor(ids))  # with their gradients, which must not matter


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    embed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_input_embeddings()
    return folder, lambda ids: embed(torch.tensor(ids))


def make_llm(folder, **arguments):
    from frame import LLM

    arguments = {"max_model_len": 128, "num_gpu_blocks_override": 400, "enable_prompt_embeds": True, **arguments}
    return LLM(model=str(folder), dtype="float32", skip_tokenizer_init=True, **arguments)


def generate(llm, prompts, **params):
    from frame import SamplingParams

    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "detokenize": False, **params}
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def with_ids(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]


def test_embeddings_of_ids_are_the_ids(checkpoint):
    """Alone, mixed with ids in one batch, and with ids in one prompt."""
    folder, embed = checkpoint
    llm, prompts = make_llm(folder), make_prompts()
    expected = generate(llm, with_ids(prompts))
    assert generate(llm, [{"prompt_embeds": embed(ids)} for ids in prompts]) == expected
    mixed = [{"prompt_embeds": embed(ids)} if n % 2 else {"prompt_token_ids": ids} for n, ids in enumerate(prompts)]
    assert generate(llm, mixed) == expected
    ids = prompts[0]
    parts = {"prompt_token_ids": [*ids[:5], -1, *ids[20:40], -1], "prompt_embeds": [embed(ids[5:20]), embed(ids[40:])]}
    assert generate(llm, [parts]) == expected[:1]
    assert generate(llm, with_ids(prompts)) == expected
    llm.close()


def test_in_chunks(checkpoint):
    folder, embed = checkpoint
    llm = make_llm(folder, max_num_batched_tokens=13, max_num_seqs=4, enable_prefix_caching=False)
    prompts = make_prompts()
    mixed = [
        {"prompt_embeds": embed(ids)} if n % 2 == 0 else {"prompt_token_ids": ids} for n, ids in enumerate(prompts)
    ]
    assert generate(llm, mixed) == generate(llm, with_ids(prompts))
    llm.close()


@pytest.mark.parametrize("exact", [False, True])
def test_after_preemption(llama, exact):
    folder, embed = llama
    llm = make_llm(
        folder, num_gpu_blocks_override=24, block_size=8, max_model_len=88, enable_prefix_caching=False,
        async_scheduling=not exact,
    )  # fmt: skip
    prompts = sorted(make_prompts(), key=len)
    prompts = prompts[:3] * 4 + prompts
    found = generate(llm, [{"prompt_embeds": embed(ids)} for ids in prompts])
    assert llm.llm_engine.core.stats().preemptions > 0
    assert found == generate(llm, with_ids(prompts))
    llm.close()


def test_other_embeddings_share_no_block(llama):
    folder, embed = llama
    llm, ids = make_llm(folder, block_size=8), make_prompts()[0]
    other = embed(ids).detach().clone()
    other[20] += 1  # in the third block
    first = generate(llm, [{"prompt_embeds": embed(ids)}])

    def hits():
        return llm.llm_engine.core.stats().prefix_hits

    before = hits()
    assert generate(llm, [{"prompt_embeds": embed(ids)}]) == first
    assert hits() - before == 56
    before = hits()
    changed = generate(llm, [{"prompt_embeds": other}])
    assert hits() - before == 16
    assert changed != first
    assert generate(llm, with_ids([ids])) == first
    assert hits() - before == 16
    alone = make_llm(folder, enable_prefix_caching=False)
    assert generate(alone, [{"prompt_embeds": other}]) == changed
    alone.close()
    llm.close()


def test_the_caller_may_change_the_tensor_and_types_are_cast(llama):
    folder, embed = llama
    llm, ids = make_llm(folder), make_prompts()[2]
    half = embed(ids).detach().bfloat16()
    expected = generate(llm, [{"prompt_embeds": half.float()}])
    assert generate(llm, [{"prompt_embeds": half}]) == expected
    assert generate(llm, [{"prompt_embeds": half.float().numpy()}]) == expected
    array = half.float().numpy().copy()
    parsed = parse_prompt({"prompt_embeds": array})
    array[:] = 0
    assert generate(llm, [parsed]) == expected
    llm.close()


def test_penalties_do_not_count_tokens_without_an_id(llama):
    folder, embed = llama
    llm, ids = make_llm(folder), make_prompts()[2]
    prompt = {"prompt_embeds": embed(ids)}
    plain = generate(llm, [prompt], max_tokens=1)
    # no id of the prompt is known, so that nothing is penalised before the first token
    assert generate(llm, [prompt], max_tokens=1, repetition_penalty=50.0) == plain
    llm.close()


@pytest.mark.parametrize("executor", ["threads", "process"])
def test_two_tensor_ranks(llama, executor):
    """Also in processes of their own, which are sent the embeddings as bytes."""
    folder, embed = llama
    prompts = make_prompts()

    def tokens(size, given, **settings):
        values = {**SMALL, "model": str(folder), "num_threads": 1, "enable_prompt_embeds": True, **settings}
        found = {}
        with running(from_flat(values), with_threads(Registry.load())) as engine:
            for number, one in enumerate(given):
                ids, embeds = parse_prompt(one).token_ids, parse_prompt(one).embeds
                made = request(str(number), ids.tolist(), max_tokens=8)
                made.embeds = embeds
                engine.add(made)
            while engine.has_unfinished():
                for output in engine.step():
                    found.setdefault(output.request_id, []).extend(output.token_ids)
        return found

    expected = tokens(1, with_ids(prompts))
    given = [{"prompt_embeds": embed(ids)} for ids in prompts]
    assert tokens(2, given, tensor_parallel_size=2, executor=executor) == expected


@pytest.mark.parametrize("family", ["gemma3n", "gemma4-shared"])
def test_families_that_need_ids_are_refused_by_name(family, tmp_path):
    make_checkpoint(tmp_path, family)
    with pytest.raises(ValueError, match=r"enable_prompt_embeds is not for Gemma.*reads the ids of tokens beside"):
        make_llm(tmp_path)


def test_wrapped_classes_take_them(llama):
    folder, embed = llama
    llm, prompts = make_llm(folder, model_impl="transformers"), make_prompts()[:3]
    given = [{"prompt_embeds": embed(prompts[0])}, *with_ids(prompts[1:])]
    assert generate(llm, given) == generate(llm, with_ids(prompts))
    llm.close()


REFUSED = {
    "narrow": (torch.zeros(4, 7), r"must have the shape \[n, 64\], got \[4, 7\]"),
    "one row": (torch.zeros(64), r"must have the shape \[n, hidden size\], got \[64\]"),
    "batch": (torch.zeros(1, 4, 64), r"must have the shape \[n, hidden size\], got \[1, 4, 64\]"),
    "empty": (torch.zeros(0, 64), r"got \[0, 64\]"),
    "float64": (torch.zeros(4, 64, dtype=torch.float64), "must be of type float32, float16, bfloat16, got float64"),
    "array": (np.zeros((4, 64)), "must be of type float32, float16, bfloat16, got float64"),
    "NaN": (torch.full((4, 64), float("nan")), "must be finite; row 0 holds NaN or infinity"),
    "too long": (torch.zeros(128, 64), "the prompt has 128 tokens, but the model takes 128"),
    "list": ([[1.0, 2.0]], "must be a tensor, or safetensors bytes as base64 text, got list"),
}


@pytest.fixture(scope="module")
def refusing(llama):
    llm = make_llm(llama[0])
    yield llm
    llm.close()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(refusing, case):
    value, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        generate(refusing, [{"prompt_token_ids": [5]}, {"prompt_embeds": value}])


def test_what_does_not_go_together_is_refused(refusing):
    rows = torch.zeros(4, 64)
    with pytest.raises(ValueError, match="prompt_logprobs is not for prompts with prompt_embeds"):
        generate(refusing, [{"prompt_embeds": rows}], prompt_logprobs=1)
    with pytest.raises(ValueError, match=r"2 places for embeddings \(token id -1\) and 1 prompt_embeds"):
        generate(refusing, [{"prompt_embeds": rows, "prompt_token_ids": [-1, 5, -1]}])
    with pytest.raises(ValueError, match="prompt token 0 is -3"):
        generate(refusing, [{"prompt_embeds": rows, "prompt_token_ids": [-3, -1]}])
    with pytest.raises(ValueError, match="prompt token 1 is -1"):
        generate(refusing, [{"prompt_token_ids": [5, -1]}])


def test_they_are_off_unless_asked_for(llama):
    llm = make_llm(llama[0], enable_prompt_embeds=False)
    with pytest.raises(ValueError, match="not accepted; start the engine with --enable-prompt-embeds"):
        generate(llm, [{"prompt_embeds": torch.zeros(4, 64)}])
    assert llm.llm_engine.front.info.embed_size == 0
    llm.close()


def test_steps_that_are_too_large_are_refused_at_the_start(llama):
    with pytest.raises(ValueError, match="max_num_batched_tokens 1000000 take 256000000 bytes, at most 134217728"):
        make_llm(llama[0], max_num_batched_tokens=1000000)
