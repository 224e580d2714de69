"""Models with an encoder and a decoder: tokens equal transformers', however requests are batched and computed."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.config.flat import from_flat
from frame.core.interfaces.adapters import Adapters
from frame.core.interfaces.errors import InvalidRequest
from frame.core.plugin_host.registry import Registry
from frame.plugins.adapters.lora import LoraAdapters
from frame.plugins.platforms.cpu import CpuPlatform
from frame.testing.encoder_decoders import ENCODER_DECODER_FAMILIES, continued, make_encoder_decoder
from frame.testing.engines import SMALL, request, running
from frame.testing.thread_executor import with_threads
from tests.contract.static_shapes import FewSizes

NUM_TOKENS = 12
LENGTHS = (60, 3, 33, 1, 17, 48)
#: What each decoder begins with.
STARTS = {"t5": [0], "mt5": [0], "umt5": [0], "bart": [2], "mbart": [2]}
BOTH = ["t5", pytest.param("bart", marks=pytest.mark.matrix)]
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.matrix] if row.in_matrix else [])
    for name, row in ENCODER_DECODER_FAMILIES.items()
]


def make_prompts():
    draw = random.Random(7)
    return [draw.choices(range(3, 512), k=length) for length in LENGTHS]


def make_llm(folder, **arguments):
    from frame import LLM

    arguments = {"max_model_len": 128, "num_gpu_blocks_override": 400, **arguments}
    return LLM(model=str(folder), dtype="float32", **{"skip_tokenizer_init": True, **arguments})


def outputs_of(llm, prompts, **params):
    from frame import SamplingParams

    params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, **params}
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def generate(llm, prompts, **params):
    return [list(output.outputs[0].token_ids) for output in outputs_of(llm, prompts, **params)]


def plain(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]


def both(encoder, decoder=None):
    return {
        "encoder_prompt": {"prompt_token_ids": encoder},
        "decoder_prompt": None if decoder is None else {"prompt_token_ids": decoder},
    }


def compared(folder, model_type):
    return [continued(folder, prompt, STARTS[model_type], NUM_TOKENS) for prompt in make_prompts()]


@pytest.fixture(scope="module", params=BOTH)
def checkpoint(request, tmp_path_factory):
    """(folder, what transformers begins with for each prompt)"""
    folder = make_encoder_decoder(tmp_path_factory.mktemp("both"), request.param)
    return folder, compared(folder, request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_together_in_both_forms(family, tmp_path):
    folder = make_encoder_decoder(tmp_path, family)
    model_type = ENCODER_DECODER_FAMILIES[family].model_type
    prompts, expected = make_prompts(), compared(folder, model_type)
    assert len({tuple(one) for one in expected}) == len(expected), "each prompt must matter"
    assert max(len(set(one)) for one in expected) > 3, "the tokens before must matter"
    llm = make_llm(folder)
    assert generate(llm, plain(prompts[:1])) == expected[:1]
    found = outputs_of(llm, plain(prompts))
    assert [list(one.outputs[0].token_ids) for one in found] == expected
    assert [one.encoder_prompt_token_ids for one in found] == prompts
    assert {tuple(one.prompt_token_ids) for one in found} == {tuple(STARTS[model_type])}
    assert generate(llm, [both(prompt) for prompt in prompts]) == expected
    # the decoder goes on behind what it is given, with or without the token that all begin with
    for start in (STARTS[model_type], STARTS[model_type][1:]):
        given = both(prompts[0], [*start, *expected[0][:5]])
        assert generate(llm, [given])[0][: NUM_TOKENS - 5] == expected[0][5:]
    llm.close()


def test_what_the_generation_config_forces_follows_the_start(tmp_path):
    folder = make_encoder_decoder(tmp_path, "bart", forced_bos=1)
    llm, prompt = make_llm(folder), make_prompts()[2]
    (found,) = outputs_of(llm, plain([prompt]))
    assert found.prompt_token_ids == [2, 1]
    assert list(found.outputs[0].token_ids) == continued(folder, prompt, [2, 1], NUM_TOKENS)
    (given,) = outputs_of(llm, [both(prompt, [7])])
    assert given.prompt_token_ids == [2, 7]
    llm.close()


@pytest.mark.parametrize("family", ["t5-gated", pytest.param("umt5", marks=pytest.mark.matrix)])
def test_a_head_of_its_own_is_read_whatever_the_configuration_says(family, tmp_path):
    """As the checkpoints of T5 1.1 and mT5 have one."""
    folder = make_encoder_decoder(tmp_path, family, own_head=True)
    expected = compared(folder, ENCODER_DECODER_FAMILIES[family].model_type)
    llm = make_llm(folder)
    assert generate(llm, plain(make_prompts())) == expected
    llm.close()


@pytest.mark.parametrize("family", ["t5", pytest.param("mbart", marks=pytest.mark.matrix)])
def test_the_embedding_may_have_the_name_of_either_side(family, tmp_path):
    """As files have that keep one name of what several share."""
    folder = make_encoder_decoder(tmp_path, family)
    llm = make_llm(folder)
    expected = generate(llm, plain(make_prompts()[:3]))
    llm.close()
    weights = load_file(folder / "model.safetensors")
    (name,) = (one for one in weights if one.endswith("shared.weight"))
    weights[name.replace("shared", "decoder.embed_tokens")] = weights.pop(name)
    save_file(weights, folder / "model.safetensors")
    llm = make_llm(folder)
    assert generate(llm, plain(make_prompts()[:3])) == expected
    llm.close()


def test_after_preemption_the_encoder_runs_again(checkpoint):
    folder, expected = checkpoint
    llm = make_llm(folder, num_gpu_blocks_override=30, block_size=8, max_model_len=88, enable_prefix_caching=False)
    order = [1, 3, 4] * 6 + list(range(len(LENGTHS)))
    prompts = make_prompts()
    assert generate(llm, plain([prompts[i] for i in order])) == [expected[i] for i in order]
    assert llm.llm_engine.core.stats().preemptions > 0
    llm.close()


def test_chunks_of_the_decoders_prompt_and_small_steps(checkpoint):
    """A step takes an encoder prompt whole, beside as much of others as fits."""
    folder, _ = checkpoint
    decoder = random.Random(1).choices(range(3, 512), k=70)
    prompts = [both(prompt, decoder[: 70 - n]) for n, prompt in enumerate(make_prompts())]
    large, small = make_llm(folder), make_llm(folder, max_num_batched_tokens=62, max_num_seqs=4)
    expected = generate(large, prompts)
    start = list(outputs_of(large, prompts[:1])[0].prompt_token_ids)
    assert expected[0] == continued(folder, make_prompts()[0], start, NUM_TOKENS)
    assert generate(small, prompts) == expected
    large.close()
    small.close()


def test_a_prefix_is_found_only_behind_the_same_encoder_prompt(checkpoint):
    folder, _ = checkpoint
    decoder = random.Random(1).choices(range(3, 512), k=40)
    llm, alone = make_llm(folder, block_size=8), make_llm(folder, enable_prefix_caching=False)
    first, second = (both(prompt, decoder) for prompt in make_prompts()[:2])
    expected = generate(alone, [first]) + generate(alone, [second])
    assert expected[0] != expected[1]

    def hits():
        return llm.llm_engine.core.stats().prefix_hits

    assert generate(llm, [first]) == expected[:1]
    assert generate(llm, [second]) == expected[1:]
    assert hits() == 0
    assert generate(llm, [first, second]) == expected
    assert hits() == 80
    llm.close()
    alone.close()


def test_a_failed_step_is_computed_again(checkpoint, monkeypatch):
    from frame.core.worker.step.runner import Runner

    folder, expected = checkpoint
    execute, fails = Runner.execute, [True]

    def sometimes(self, plan):
        execute(self, plan)
        if len(plan.added) > 1 and fails:
            fails.pop()
            raise RuntimeError("broken once")

    llm = make_llm(folder)
    monkeypatch.setattr(Runner, "execute", sometimes)
    assert generate(llm, plain(make_prompts())) == expected
    assert not fails
    llm.close()


def test_with_speculation_and_in_synchronous_steps(checkpoint):
    folder, expected = checkpoint
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 1}
    llm = make_llm(folder, speculative_config=speculation)
    assert generate(llm, plain(make_prompts())) == expected
    assert llm.llm_engine.core.stats().num_draft_tokens > 0
    llm.close()
    llm = make_llm(folder, async_scheduling=False)
    assert generate(llm, plain(make_prompts())) == expected
    llm.close()


def test_steps_that_are_padded(checkpoint, monkeypatch):
    """Rows and tokens that fill up read no encoder prompt; max_seq_len is of the decoder alone."""
    folder, expected = checkpoint
    monkeypatch.setattr(CpuPlatform, "steps", FewSizes.steps)
    llm = make_llm(folder)
    assert generate(llm, plain(make_prompts())) == expected
    llm.close()


@pytest.mark.parametrize("executor", ["threads", pytest.param("process", marks=pytest.mark.matrix)])
def test_two_tensor_ranks(checkpoint, executor):
    folder, expected = checkpoint
    values = {**SMALL, "model": str(folder), "num_threads": 1, "tensor_parallel_size": 2, "executor": executor}
    found, start = {}, STARTS[json.loads((folder / "config.json").read_text())["model_type"]]
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        for number, prompt in enumerate(make_prompts()):
            made = request(str(number), start, NUM_TOKENS)
            made.encoder_ids = np.array(prompt, np.int32)
            engine.add(made)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.error is None
                found.setdefault(int(output.request_id), []).extend(output.token_ids)
    assert [found[number] for number in range(len(expected))] == expected


REFUSED = {
    "no encoder part": ({"decoder_prompt": [5]}, "a prompt with 'decoder_prompt' needs its 'encoder_prompt'"),
    "an unknown field": ({"encoder_prompt": [5], "prompt": "x"}, "no field 'prompt' in a prompt with 'encoder_prompt'"),
    "nested": ({"encoder_prompt": {"encoder_prompt": [5]}}, "'encoder_prompt' must be text, token ids, or a prompt"),
    "embeddings": ({"encoder_prompt": {"prompt_embeds": 1}}, "'encoder_prompt' must be text, token ids, or a prompt"),
    "empty": ({"encoder_prompt": {"prompt_token_ids": []}}, "the encoder prompt has 0 tokens; .* reads 1 to 128"),
    "too long": ({"prompt_token_ids": [5] * 129}, "the encoder prompt has 129 tokens; .* reads 1 to 128, all in one"),
    "an unknown id": ({"prompt_token_ids": [5, 600]}, "prompt token 1 is 600, but ids go from 0 to 511"),
    "another type": ({"encoder_prompt": 5}, "'encoder_prompt': a prompt must be text, token ids or a dict of either"),
    "the decoder's type": (
        {"encoder_prompt": [5], "decoder_prompt": [True]},
        "'decoder_prompt': prompt token ids must",
    ),
    "the encoder's id": ({"encoder_prompt": [5, -1]}, "'encoder_prompt': prompt token 1 is -1, but ids go from 0"),
    "the decoder's id": ({"encoder_prompt": [5], "decoder_prompt": [600]}, "'decoder_prompt': prompt token 0 is 600"),
    "decoder too long": (both([5], [5] * 128), "the prompt has 129 tokens, but the model takes 128"),
}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    llm = make_llm(make_encoder_decoder(tmp_path_factory.mktemp("t5"), "t5", tokenizer=True), skip_tokenizer_init=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(refusing, case):
    prompt, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        generate(refusing, [{"prompt_token_ids": [5]}, prompt])


@pytest.mark.parametrize(("prompt", "name"), [({"prompt_token_ids": []}, "prompt"), (both([]), "encoder_prompt")])
def test_the_part_that_is_wrong_is_one_that_was_given(refusing, prompt, name):
    with pytest.raises(InvalidRequest, match="the encoder prompt has 0 tokens") as caught:
        generate(refusing, [prompt])
    assert caught.value.param == name


def test_texts_of_both_sides_and_truncation(refusing):
    tokenizer = refusing.get_tokenizer()
    told, begun = tokenizer.encode("a text to read"), tokenizer.encode("as", add_special_tokens=False)
    expected = generate(refusing, [both(told, begun)])
    given = {"encoder_prompt": "a text to read", "decoder_prompt": "as"}
    (found,) = outputs_of(refusing, [given])
    assert [list(found.outputs[0].token_ids)] == expected
    assert (found.prompt, found.encoder_prompt) == ("as", "a text to read")
    assert generate(refusing, ["a text to read"]) == generate(refusing, plain([told]))
    for prompt in ("a text to read", {"prompt_token_ids": told}, both(told)):
        (found,) = outputs_of(refusing, [prompt], truncate_prompt_tokens=4)
        assert found.encoder_prompt_token_ids == told[-4:]
        assert [list(found.outputs[0].token_ids)] == generate(refusing, plain([told[-4:]]))


def test_what_is_not_for_such_models_is_refused_by_name(refusing, tmp_path):
    from frame import BeamSearchParams

    with pytest.raises(ValueError, match="chats are not for a model with an encoder and a decoder"):
        refusing.chat([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="beam search is not for a model with an encoder and a decoder"):
        refusing.beam_search(["x"], BeamSearchParams(beam_width=2, max_tokens=2))
    folder = refusing.llm_engine.config.model.model
    with pytest.raises(ValueError, match="a model with an encoder and a decoder does not pool"):
        make_llm(folder, runner="pooling")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoraAdapters, "prepare_read", Adapters.prepare_read)
        with pytest.raises(ValueError, match="plugin LoraAdapters is not for a model with an encoder and a decoder"):
            make_llm(folder, enable_lora=True)
    with pytest.raises(ValueError, match=r"KV connector 'disk' cannot move what 'decoder\.block\.0\.layer\.1"):
        make_llm(folder, kv_connector="disk", plugin={"disk": {"folder": str(tmp_path)}})


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_deterministic_steps_are_refused_in_one_sentence_that_says_why(family, tmp_path):
    with pytest.raises(ValueError, match="deterministic is not for a model with an encoder and a decoder") as caught:
        make_llm(make_encoder_decoder(tmp_path, family), deterministic=True)
    text = str(caught.value)
    assert "no attention backend" in text
    assert text.endswith("leave it out")
    assert not any(name in text for name in ("triton", "flash", "cudnn", "torch", ";"))


def test_steps_too_small_for_an_encoder_prompt_say_so(tmp_path):
    llm = make_llm(make_encoder_decoder(tmp_path, "t5"), max_num_batched_tokens=32, max_num_seqs=4)
    assert len(generate(llm, plain([[5] * 31]))[0]) == NUM_TOKENS
    with pytest.raises(ValueError, match=r"encoder prompt .* has 32 tokens; .* fewer than max_num_batched_tokens 32"):
        generate(llm, plain([[5] * 32]))
    llm.close()


def test_decoders_take_no_encoder_prompt(tmp_path):
    from frame.testing.checkpoints import make_checkpoint

    llm = make_llm(make_checkpoint(tmp_path, "llama"))
    with pytest.raises(ValueError, match="the model has no encoder, so its prompts have no 'encoder_prompt'"):
        generate(llm, [both([5])])
    llm.close()


def test_what_the_encoder_gives_counts_in_memory(tmp_path):
    """A request has room for its encoder prompt: half of each pool, as long as the decoder's part may get."""
    folder = make_encoder_decoder(tmp_path, "t5")
    llm = make_llm(folder, num_gpu_blocks_override=13, block_size=8, max_model_len=88)
    assert llm.llm_engine.front.info.max_model_len == 49  # 6 blocks of each, and a token that is never fed back
    assert len(generate(llm, plain([[5] * 49]), max_tokens=40)[0]) == 40
    llm.close()


@pytest.mark.parametrize("family", BOTH)
def test_prompts_longer_than_a_tile_and_their_log_probabilities(family, tmp_path):
    """Both sides are attended in parts, whose biases must be those of their places."""
    from transformers import AutoModelForSeq2SeqLM

    folder = make_encoder_decoder(tmp_path, family, n_positions=600, max_position_embeddings=600)
    draw, start = random.Random(3), STARTS[family]
    encoder, decoder = draw.choices(range(3, 512), k=300), [*start, *draw.choices(range(3, 512), k=290)]
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([encoder]), decoder_input_ids=torch.tensor([decoder])).logits[0]
    # such a T5 makes a hundred thousand times as much of a rounding, so that both must round alike
    llm = make_llm(folder, max_model_len=400, plugin={"cpu": {"native_kernels": False}})
    (found,) = outputs_of(llm, [both(encoder, decoder)], prompt_logprobs=0, max_tokens=1)
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(decoder[1:])[:, None])[:, 0]
    given = torch.tensor(
        [row[token].logprob for row, token in zip(found.prompt_logprobs[1:], decoder[1:], strict=True)]
    )
    assert (given - expected).abs().max() < 1e-3
    llm.close()
