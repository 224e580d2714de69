from __future__ import annotations

import pytest

from frame.core.config.flat import from_flat
from frame.core.front.front import Front
from frame.core.front.prompts import InvalidRequest
from frame.interfaces import RequestOutputKind, SamplingParams
from frame.offline.beam import BeamSearchParams
from frame.offline.engine import LLMEngine
from frame.offline.llm import LLM
from frame.offline.metrics import Counter, Gauge, Histogram, Vector

from .engines import INFO, FakeEngine
from .test_front import checkpoint


def make_llm(source, script=None, generation=None, **flat):
    """An LLM over a fake engine that echoes the prompt, backwards."""
    engine = FakeEngine(script or (lambda request: request.prompt_ids[::-1].tolist()), width=3)
    config = from_flat(flat)
    front = Front(config, checkpoint(generation=generation or {}), INFO, tokenizer=source)
    return LLM.from_engine(LLMEngine(config, engine, front)), engine


@pytest.fixture
def llm(source):
    return make_llm(source)[0]


def test_outputs_come_in_the_order_of_the_prompts(llm, tokenizer):
    prompts = ["hello world", [9, 8], {"prompt": "fox"}, {"prompt_token_ids": [7, 6, 5], "prompt": "x"}]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=30), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["hello world", None, "fox", "x"]
    assert [output.prompt_token_ids for output in outputs][1::2] == [[9, 8], [7, 6, 5]]
    assert [output.outputs[0].token_ids for output in outputs] == [o.prompt_token_ids[::-1] for o in outputs]
    assert all(output.finished for output in outputs)
    assert llm.generate("fox", use_tqdm=False)[0].prompt == "fox"
    assert llm.generate([4, 3], use_tqdm=False)[0].prompt_token_ids == [4, 3]
    assert llm.generate([], use_tqdm=False) == []


def test_one_parameter_for_all_or_one_each(llm):
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    outputs = llm.generate([[9, 8, 7], [9, 8, 7]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert params[0].output_kind == RequestOutputKind.CUMULATIVE
    with pytest.raises(ValueError, match="2 sampling params were given for 3 prompts"):
        llm.generate([[1], [2], [3]], params, use_tqdm=False)
    with pytest.raises(ValueError, match="must be SamplingParams, got dict"):
        llm.generate([[1]], {"temperature": 0}, use_tqdm=False)


def test_defaults_come_from_the_generation_config(source):
    llm, engine = make_llm(source, generation={"temperature": 0.25, "max_new_tokens": 2})
    seen = []
    engine.script = lambda request: seen.append(request.params) or [5, 6, 7, 8]
    assert llm.get_default_sampling_params().temperature == 0.25
    assert len(llm.generate([1], use_tqdm=False)[0].outputs[0].token_ids) == 2
    assert seen[0].temperature == 0.25
    # the cap holds for everybody
    assert len(llm.generate([1], SamplingParams(max_tokens=9), use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_a_bad_prompt_leaves_nothing_behind(source):
    llm, engine = make_llm(source)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate(["hello", ""], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="more KV blocks"):
        llm.generate([[1], [1] * 55], SamplingParams(n=2), use_tqdm=False)
    assert not engine.requests
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("hello", use_tqdm=False)[0].finished


def test_an_interrupt_leaves_nothing_behind(source):
    def script(request):
        if request.request_id == "1":
            engine.step = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        return [1, 2]

    llm, engine = make_llm(source, script)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], use_tqdm=False)
    assert not engine.requests


def test_priorities_are_checked(llm, source):
    with pytest.raises(ValueError, match="1 priorities were given for 2 prompts"):
        llm.generate([[1], [2]], priority=[1], use_tqdm=False)
    with pytest.raises(ValueError, match="needs scheduling_policy 'priority'"):
        llm.generate([[1], [2]], priority=[1, 2], use_tqdm=False)
    seen = []
    llm, _ = make_llm(source, lambda request: seen.append(request.priority) or [1], scheduling_policy="priority")
    llm.generate([[1], [2]], priority=[4, 2], use_tqdm=False)
    assert seen == [4, 2]


def test_legacy_keywords(llm):
    (output,) = llm.generate(prompt_token_ids=[5, 6], use_tqdm=False)
    assert output.prompt_token_ids == [5, 6]
    outputs = llm.generate(prompts=["a", "b"], prompt_token_ids=[[5], [6]], use_tqdm=False)
    assert [(output.prompt, output.prompt_token_ids) for output in outputs] == [("a", [5]), ("b", [6])]
    with pytest.raises(ValueError, match="2 prompts were given with 1 lists"):
        llm.generate(prompts=["a", "b"], prompt_token_ids=[[5]], use_tqdm=False)
    with pytest.raises(ValueError, match="lora_request must be a LoRARequest"):
        llm.generate([1], lora_request=object(), use_tqdm=False)


def test_unknown_keywords_are_refused_with_the_nearest_or_all_names(llm):
    with pytest.raises(InvalidRequest, match=r"generate has no keyword 'promts' \(did you mean prompts\?\)"):
        llm.generate(promts=[1])
    with pytest.raises(InvalidRequest, match="generate has no keyword 'temperature'; there are: prompts, sam"):
        llm.generate([1], temperature=1)
    with pytest.raises(InvalidRequest, match=r"embed has no keyword 'pooling_parms' \(did you mean pooling_params"):
        llm.embed([1], pooling_parms=None)


def test_chat(llm):
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.prompt == "<bos><user>hello<assistant>"
    outputs = llm.chat([messages, messages], SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(outputs) == 2
    (prompt,) = llm.preprocess_chat(messages)
    assert (prompt["prompt"], prompt["prompt_token_ids"]) == (output.prompt, output.prompt_token_ids)
    with pytest.raises(ValueError, match="exclude each other"):
        llm.chat(messages, continue_final_message=True, use_tqdm=False)


def test_a_configured_template_is_the_default(source, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}?")
    llm, _ = make_llm(source, chat_template=str(tmp_path / "t.jinja"))
    assert llm.preprocess_chat([{"role": "user", "content": "fox"}])[0]["prompt"] == "fox?"
    with pytest.raises(ValueError, match="neither a template nor a readable file"):
        make_llm(source, chat_template="missing.jinja")


def test_progress_bars_are_tqdm_or_the_callers(llm, capsys):
    bars = []

    class Bar:
        def __init__(self, **keywords):
            self.total, self.done, self.closed = keywords["total"], 0, False
            bars.append(self)

        def update(self, number):
            self.done += number

        def set_postfix_str(self, text, refresh):
            assert "tok/s" in text

        def close(self):
            self.closed = True

    llm.generate([[1], [2]], use_tqdm=Bar)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(2, 2, True)]
    llm.generate([1])
    assert "Processed prompts" in capsys.readouterr().err


def test_metrics_are_kept_on_request(source):
    llm, _ = make_llm(source)
    with pytest.raises(RuntimeError, match="disable_log_stats=False"):
        llm.get_metrics()
    llm, _ = make_llm(source, disable_log_stats=False)
    llm.generate([[7, 8, 9], [5, 6]], use_tqdm=False)
    metrics = llm.get_metrics()
    by_name = {metric.name: metric for metric in metrics if not metric.labels}
    assert {type(metric) for metric in metrics} == {Gauge, Counter, Vector, Histogram}
    assert by_name["frame_generation_tokens"].value == 5
    assert by_name["frame_requests_by_finish_reason"].values == [0, 2, 0, 0]
    latency = by_name["frame_e2e_request_latency_seconds"]
    assert (latency.count, latency.buckets["+Inf"]) == (2, 2)
    assert latency.sum > 0


def test_control_calls_reach_the_engine(source):
    llm, engine = make_llm(source)
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    assert engine.calls == [("reset_prefix_cache", {"reset_running_requests": True, "reset_connector": False})]
    with pytest.raises(ValueError, match="sleep level must be 1 or 2, got 7"):
        llm.sleep(7)
    llm.close()
    assert engine.closed


def test_the_engine_loop_by_hand(source, tokenizer):
    llm, _ = make_llm(source)
    engine = llm.llm_engine
    engine.add_request("a", "hello world the fox", SamplingParams(max_tokens=20))
    engine.add_request("b", [9, 8, 7, 6], SamplingParams(n=2, logprobs=1, prompt_logprobs=1))
    engine.add_request("c", [9, 8, 7, 6], SamplingParams())
    engine.abort_request("c")
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    assert sorted(output.request_id for output in finished) == ["a", "b"]
    (b,) = (output for output in finished if output.request_id == "b")
    assert [completion.token_ids for completion in b.outputs] == [[6, 7, 8, 9]] * 2
    assert len(b.prompt_logprobs) == 4
    assert [len(completion.logprobs) for completion in b.outputs] == [4, 4]
    assert engine.get_tokenizer() is tokenizer.native


def test_a_lost_request_is_an_error(source):
    llm, engine = make_llm(source)
    engine.step = lambda: engine.requests.clear() or []
    with pytest.raises(RuntimeError, match="the engine lost 1 requests"):
        llm.generate([1], use_tqdm=False)


@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (3, 1.0), (3, 0.0)])
def test_beam_search_finds_the_best_of_a_small_tree(source, tokenizer, width, length_penalty):
    """Against plain enumeration, on a model whose next-token scores depend on the last token."""
    import math

    import numpy as np

    from frame.interfaces import EngineOutput, LogprobRows

    eos = tokenizer.eos_token_id
    table = {  # last token -> (token, probability), best first
        10: [(11, 0.5), (12, 0.4), (eos, 0.1)],
        11: [(11, 0.4), (12, 0.35), (eos, 0.25)],
        12: [(12, 0.9), (11, 0.05), (eos, 0.05)],
    }

    def answer(self):
        outputs = []
        for request_id, (request, _, _) in self.requests.items():
            best = table[int(request.prompt_ids[-1])][: request.params.logprobs]
            ids = [best[0][0], *(token for token, _ in best)]
            values = [math.log(best[0][1]), *(math.log(chance) for _, chance in best)]
            rows = LogprobRows(token_ids=np.array([ids]), logprobs=np.array([values], np.float32), ranks=np.array([1]))
            outputs.append(
                EngineOutput(request_id=request_id, token_ids=ids[:1], logprobs=rows, finish_reason="length")
            )
        self.requests.clear()
        return outputs

    llm, engine = make_llm(source)
    engine.step = answer.__get__(engine)
    params = BeamSearchParams(beam_width=width, max_tokens=3, length_penalty=length_penalty)
    (output,) = llm.beam_search([{"prompt_token_ids": [10]}], params)

    beams, done = [((10,), 0.0)], []
    for _ in range(3):
        grown = [
            ((*ids, token), score + math.log(chance))
            for ids, score in beams
            for token, chance in table[ids[-1]][: 2 * width]
        ]
        done += [one for one in grown if one[0][-1] == eos]
        beams = sorted((one for one in grown if one[0][-1] != eos), key=lambda one: -one[1])[:width]

    def score(one):
        length = len(one[0]) - 1 - (one[0][-1] == eos)
        return one[1] / max(length, 1) ** length_penalty

    best = sorted(done + beams, key=score, reverse=True)[:width]
    assert [tuple(beam.tokens) for beam in output.sequences] == [ids for ids, _ in best]
    assert [beam.cum_logprob for beam in output.sequences] == pytest.approx([value for _, value in best])
    assert all(isinstance(beam.text, str) for beam in output.sequences)


def test_beam_search_parameters():
    with pytest.raises(ValueError, match="beam_width must be an integer of at least 1, got 0"):
        BeamSearchParams(beam_width=0, max_tokens=1)
