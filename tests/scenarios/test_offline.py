"""Offline use as users' programs do it, over real engines on tiny random checkpoints."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from frame import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from frame.interfaces import LogitsProcessor
from frame.offline.metrics import Counter, Gauge, Histogram, Vector
from frame.testing.checkpoints import make_checkpoint

SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 200, "dtype": "float32", "max_num_seqs": 64}
PROMPTS = ["hello there", "the quick brown fox jumps over the lazy dog", "日本語 😀", "a"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("offline") / "llama", "llama", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(model=str(folder), disable_log_stats=False, **SMALL)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_1_prompts_in_and_out_in_order_equal_to_transformers(llm, folder):
    from transformers import AutoModelForCausalLM

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == tokenizer(prompt)["input_ids"]
        sequence = torch.tensor([output.prompt_token_ids])
        for token in output.outputs[0].token_ids:
            with torch.inference_mode():
                assert int(model(sequence).logits[0, -1].argmax()) == token
            sequence = torch.cat([sequence, torch.tensor([[token]])], 1)
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_2_parameters_by_prompt(llm):
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (1, 5, 2, 3)]
    assert [len(one) for one in ids(llm.generate(PROMPTS, params, use_tqdm=False))] == [1, 5, 2, 3]
    with pytest.raises(ValueError, match="4 sampling params were given for 1 prompts"):
        llm.generate("a", params)


def test_3_defaults_from_the_generation_config(folder, tmp_path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.3, "top_k": 7, "max_new_tokens": 3, "eos_token_id": [2, 5]})
    )
    llm = LLM(model=str(folder), generation_config=str(tmp_path), **SMALL)
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.3, 7, 3)
    assert len(ids(llm.generate("hello", use_tqdm=False))[0]) <= 3
    assert len(ids(llm.generate("hello", GREEDY, use_tqdm=False))[0]) == 3


def test_4_the_engine_loop_by_hand(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **SMALL))
    waiting = [
        ("a", SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1)),
        ("b", SamplingParams(top_k=5, presence_penalty=0.2)),
        ("c", SamplingParams(n=2, top_p=0.95, frequency_penalty=0.1)),
        ("d", SamplingParams(temperature=0, max_tokens=3)),
    ]
    finished = {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            request_id, params = waiting.pop(0)
            engine.add_request(request_id, "hello there", params)
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed; start another one"):
        engine.add_request("late", PROMPTS[0], SAMPLED)
    assert sorted(finished) == ["a", "b", "c", "d"]
    first = finished["a"].outputs[0]
    assert len(first.logprobs) == len(first.token_ids)
    assert len(finished["a"].prompt_logprobs) == len(finished["a"].prompt_token_ids)
    assert finished["a"].prompt_logprobs[0] is None
    assert [completion.index for completion in finished["c"].outputs] == [0, 1]
    assert all(completion.finished() for completion in finished["c"].outputs)


def test_5_asynchronous_deltas_join_to_the_offline_text(llm, folder):
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=30, ignore_eos=True, stop=["\x00\x00"])
    expected = [texts(llm.generate(prompt, params, use_tqdm=False))[0] for prompt in PROMPTS]
    params.output_kind = RequestOutputKind.DELTA

    async def main():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), enforce_eager=True, **SMALL))

        async def stream(number):
            text, finished = "", False
            async for output in engine.generate(request_id=str(number), prompt=PROMPTS[number], sampling_params=params):
                assert not finished
                text += output.outputs[0].text
                finished = output.finished
            return text

        try:
            found = await asyncio.gather(*(stream(number) for number in range(len(PROMPTS))))
            abandoned = engine.generate("hello", params, "abandoned")
            await anext(abandoned)
            await abandoned.aclose()
            await engine.check_health()
            for _ in range(3000):
                if (await engine.stats()).running == 0:
                    break
                await asyncio.sleep(0.01)
            running = (await engine.stats()).running
        finally:
            engine.shutdown()
        return found, running

    found, running = asyncio.run(main())
    assert found == expected
    assert running == 0
    children = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    ).stdout
    assert "frame engine" not in children


def test_6_the_prefix_cache_can_be_reset_in_the_middle(llm):
    engine = llm.llm_engine
    prompts = ["the same long prompt, twice over, with its own log-probabilities"] * 2 + ["hello there", "a"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = texts(llm.generate(prompts, params, use_tqdm=False))
    for number, prompt in enumerate(prompts):
        more = {"prompt_logprobs": 1} if number < 2 else {}
        engine.add_request(
            str(number + 1000), prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **more)
        )
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps == 10:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id) - 1000] = output
    assert texts(finished[number] for number in range(4)) == expected
    assert all(len(finished[number].prompt_logprobs) == len(finished[number].prompt_token_ids) for number in (0, 1))
    assert llm.reset_prefix_cache()
    assert engine.stats().kv_usage == 0


def test_7_prefix_caching_changes_no_text(llm, folder):
    table = "name, age, town; " * 5
    prompts = [table + "who?", table + "where?"]
    llm.reset_prefix_cache()
    before = engine_hits = llm.llm_engine.stats().prefix_hits
    cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    engine_hits = llm.llm_engine.stats().prefix_hits
    assert engine_hits > before
    assert cached[0].num_cached_tokens == 0
    assert cached[1].num_cached_tokens >= 64
    plain = LLM(model=str(folder), enable_prefix_caching=False, **SMALL)
    outputs = [plain.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert texts(outputs) == texts(cached)
    assert outputs[1].num_cached_tokens == 0


def test_8_metrics(llm, folder):
    def counters():
        return {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}

    before = counters()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = counters()
    assert after["frame_generation_tokens"] - before["frame_generation_tokens"] == 12 * len(PROMPTS)
    assert after["frame_prompt_tokens"] > before["frame_prompt_tokens"]
    assert {type(metric) for metric in llm.get_metrics()} == {Gauge, Counter, Vector, Histogram}


PROGRAM = """
import sys
from frame import LLM, SamplingParams
llm = LLM(model=sys.argv[1], max_model_len=128, num_gpu_blocks_override=200, dtype="float32")
outputs = llm.generate(["hello there", "a"], SamplingParams(temperature=0.8, n=2, max_tokens=12), use_tqdm=False)
print([completion.token_ids for output in outputs for completion in output.outputs])
"""


@pytest.mark.matrix
def test_9_unseeded_sampling_repeats_from_run_to_run(folder):
    runs = [LLM(model=str(folder), **SMALL).generate(PROMPTS, SAMPLED, use_tqdm=False) for _ in range(2)]
    assert ids(runs[0]) == ids(runs[1])
    other = LLM(model=str(folder), seed=1, **SMALL).generate(PROMPTS, SAMPLED, use_tqdm=False)
    assert ids(other) != ids(runs[0])
    results = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for _ in range(1)
    ]
    fresh = LLM(model=str(folder), max_model_len=128, num_gpu_blocks_override=200, dtype="float32")
    outputs = fresh.generate(["hello there", "a"], SamplingParams(temperature=0.8, n=2, max_tokens=12), use_tqdm=False)
    assert results == [f"{[completion.token_ids for output in outputs for completion in output.outputs]}\n"]


def test_9_deterministic_text_is_the_same_alone_and_in_a_batch_of_64(folder):
    llm = LLM(model=str(folder), deterministic=True, **SMALL)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    alone = texts(llm.generate("hello there", params, use_tqdm=False))[0]
    llm.reset_prefix_cache()
    crowd = [f"prompt number {number}" for number in range(63)]
    together = texts(llm.generate([*crowd, "hello there"], params, use_tqdm=False))
    assert together[-1] == alone


class Repeat(LogitsProcessor):
    """Only `extra_args["target_token"]` may be drawn."""

    @classmethod
    def validate(cls, params):
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token must be an integer, got {target!r}")

    def add(self, slot, params, prompt_ids, output_ids):
        self.targets = getattr(self, "targets", {})
        target = (params.extra_args or {}).get("target_token")
        self.targets.pop(slot, None)
        if target is not None:
            self.targets[slot] = target
        return target is not None

    def remove(self, slot):
        getattr(self, "targets", {}).pop(slot, None)

    def apply(self, logits, slots):
        for row, slot in enumerate(slots):
            if slot in self.targets:
                kept = logits[row, self.targets[slot]].clone()
                logits[row] = float("-inf")
                logits[row, self.targets[slot]] = kept
        return logits


@pytest.mark.parametrize("name", [Repeat, "tests_offline_repeat:Repeat"])
def test_32_targeted_rows_repeat_the_token_and_others_do_not_change(llm, folder, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "tests_offline_repeat", sys.modules[__name__])
    targets = [None, 7, None, 0]  # 0 is a token like any other
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=6,
            ignore_eos=True,
            extra_args=None if target is None else {"target_token": target},
        )
        for target in targets
    ]
    plain = ids(llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False))
    custom = LLM(model=str(folder), logits_processors=[name], **SMALL)
    found = ids(custom.generate(PROMPTS, params, use_tqdm=False))
    assert found == [plain[i] if target is None else [target] * 6 for i, target in enumerate(targets)]
    with pytest.raises(ValueError, match="target_token must be an integer, got 'x'"):
        custom.generate("a", SamplingParams(extra_args={"target_token": "x"}))


def test_34_a_wrong_processor_name_fails_the_start(folder):
    with pytest.raises(Exception, match="no_such_module"):
        LLM(model=str(folder), logits_processors=["no_such_module:Thing"], **SMALL)


def test_40_arguments_round_trip_through_dictionaries(folder):
    arguments = EngineArgs(model=str(folder), **SMALL)
    for settings in (asdict(arguments), vars(arguments)):
        llm = LLM(**settings)
        assert llm.llm_engine.config == arguments.create_engine_config()
        llm.close()


def test_41_two_engines_one_after_the_other(folder):
    import weakref

    def run():
        llm = LLM(model=str(folder), **SMALL)
        (model,) = llm.apply_model(weakref.ref)
        return ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)), model

    first, model = run()
    gc.collect()
    assert model() is None
    assert run()[0] == first


def test_beam_search_with_a_real_model(llm):
    from frame import BeamSearchParams

    (output,) = llm.beam_search(["hello there"], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    assert len(output.sequences) == 3
    scores = [beam.cum_logprob for beam in output.sequences]
    assert scores == sorted(scores, reverse=True)
    (greedy,) = llm.beam_search(["hello there"], BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
    expected = llm.generate("hello there", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    num_prompt = len(expected[0].prompt_token_ids)
    assert greedy.sequences[0].tokens[num_prompt:] == expected[0].outputs[0].token_ids


def test_workers_and_the_model_can_be_reached(llm):
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    assert llm.collective_rpc(lambda worker, number: number + 1, args=(4,)) == [5]
    (facts,) = llm.collective_rpc("describe")
    assert facts["platform"] == "cpu"
    with pytest.raises(ValueError, match="no worker method 'fly'"):
        llm.collective_rpc("fly")
    with pytest.raises(ValueError, match=r"describe cannot be bounded to 5 seconds: .* use executor 'process'"):
        llm.collective_rpc("describe", timeout=5)
    before = texts(llm.generate("hello there", GREEDY, use_tqdm=False))
    llm.sleep()
    llm.wake_up()
    assert texts(llm.generate("hello there", GREEDY, use_tqdm=False)) == before


def test_a_refusal_names_the_prompt(llm):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"^prompt 2 of 3: prompt_embeds are not accepted; start the engine with"):
        llm.generate(["a", "b", {"prompt_embeds": torch.ones(2, 4)}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^prompt_embeds are not accepted; start the engine with"):
        llm.generate({"prompt_embeds": torch.ones(2, 4)}, GREEDY, use_tqdm=False)


def test_the_engine_ends_with_the_context(llm):
    from frame import LLM

    class Engine:
        closed = False

        def close(self):
            self.closed = True

    engine = Engine()
    with LLM.from_engine(engine) as inside:
        assert not engine.closed
        assert isinstance(inside, LLM)
    assert engine.closed


def test_bad_words_never_appear(llm):
    free = llm.generate("hello there", GREEDY, use_tqdm=False)[0].outputs[0]
    word = next(character for character in free.text if character.isascii() and character.isprintable())
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
    assert word not in llm.generate("hello there", params, use_tqdm=False)[0].outputs[0].text


def test_the_engine_survives_bad_requests(llm):
    for prompt, params in [("", None), ([99999], None), ([1] * 500, None), ([1], SamplingParams(logprobs=99))]:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            llm.generate(["hello", prompt] if isinstance(prompt, str) else [[5], prompt], params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm.generate("hello there", GREEDY, use_tqdm=False))
