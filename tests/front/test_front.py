from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from frame.core.config.checkpoint import Checkpoint
from frame.core.config.flat import from_flat
from frame.core.front.front import Front
from frame.core.front.logprobs import FlatLogprobs
from frame.core.front.outputs import CompletionOutput, RequestOutput
from frame.core.front.prompts import InvalidRequest
from frame.interfaces import EngineOutput, RequestOutputKind, SamplingParams

from .engines import INFO, FakeEngine, rows, source_of

WORDS = st.text("ab日", min_size=1, max_size=2)
TEXT = "hello world, how are you? 日本語 😀 fox."


def checkpoint(**changes):
    facts = {
        "folder": Path("nowhere"),
        "hf": {},
        "text": {},
        "architecture": "A",
        "vocab_size": 400,
        "max_model_len": 64,
        "model_max_len": 64,
        "dtype": "float32",
        "eos_token_ids": [],
        "generation": {},
    }
    return Checkpoint(**(facts | changes))


def make_front(source, generation=None, **flat):
    return Front(from_flat(flat), checkpoint(generation=generation or {}), INFO, tokenizer=source)


def drain(front, engine):
    """Every RequestOutput until the engine is idle."""
    outputs = []
    while engine.has_unfinished():
        new, ended = front.process(engine.step())
        engine.abort(ended)
        outputs += new
    return outputs


def run(source, script, params, prompt="hello", width=1, **flat):
    front, engine = make_front(source, **flat), FakeEngine(script, width)
    for request in front.submit("r", prompt, params):
        engine.add(request)
    outputs = drain(front, engine)
    assert front.num_unfinished == 0
    return outputs, engine


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_priority_needs_a_policy_that_reads_it(source, policy):
    with pytest.raises(InvalidRequest, match="priority 3 needs scheduling_policy 'priority'"):
        make_front(source, scheduling_policy=policy).submit("r", [1], SamplingParams(), priority=3)
    front = make_front(source, scheduling_policy="priority")
    assert [request.priority for request in front.submit("r", [1], SamplingParams(), priority=3)] == [3]


def test_final_only_gives_one_output(source, tokenizer):
    ids = tokenizer.encode(TEXT)
    outputs, _ = run(
        source, lambda request: ids, SamplingParams(max_tokens=60, output_kind=RequestOutputKind.FINAL_ONLY)
    )
    (output,) = outputs
    assert output.finished
    assert output.prompt == "hello"
    assert output.prompt_token_ids == tokenizer.encode("hello")
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == (TEXT, ids, "length")
    assert completion.cumulative_logprob is None


@given(
    width=st.integers(1, 7),
    text=st.text(alphabet="ab日😀 \n", min_size=1, max_size=14),
    stop=st.text("ab日", min_size=1, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_deltas_join_to_the_final_text_with_stop_strings(source, tokenizer, width, text, stop):
    ids = tokenizer.encode(text)
    cut = text.find(stop)
    expected = text if cut < 0 else text[:cut]
    for kind in RequestOutputKind:
        params = SamplingParams(max_tokens=60, stop=[stop], output_kind=kind)
        outputs, _ = run(source, lambda request: ids, params, width=width)
        whole = outputs[0]
        for later in outputs[1:]:
            whole.add(later, aggregate=kind == RequestOutputKind.DELTA)
        (completion,) = whole.outputs
        assert completion.text == expected
        assert completion.finish_reason == ("length" if cut < 0 else "stop")
        assert completion.stop_reason == (None if cut < 0 else stop)
        assert tokenizer.decode(completion.token_ids).startswith(expected + ("" if cut < 0 else stop))


def test_a_stop_string_tells_the_engine_to_stop(source, tokenizer):
    outputs, engine = run(source, lambda request: tokenizer.encode("fox. the end"), SamplingParams(stop="."))
    assert engine.aborted == ["r"]
    assert outputs[-1].outputs[0].text == "fox"
    outputs, _ = run(
        source, lambda request: tokenizer.encode("fox. the end"),
        SamplingParams(stop=".", include_stop_str_in_output=True),
    )  # fmt: skip
    assert outputs[-1].outputs[0].text == "fox."


def test_stop_strings_wait_for_min_tokens(source, tokenizer):
    ids = tokenizer.encode("a.b.c")
    outputs, _ = run(source, lambda request: ids, SamplingParams(stop=".", min_tokens=2))
    assert outputs[-1].outputs[0].text == "a.b"


def test_end_tokens_are_not_decoded(source, tokenizer):
    ids = [*tokenizer.encode("fox"), tokenizer.eos_token_id, 9]
    outputs, _ = run(source, lambda request: ids, SamplingParams(skip_special_tokens=False))
    completion = outputs[-1].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("fox", "stop", None)
    assert completion.token_ids[-1] == tokenizer.eos_token_id
    outputs, _ = run(source, lambda request: ids, SamplingParams(stop_token_ids=[ids[0]]))
    completion = outputs[-1].outputs[0]
    assert (completion.text, completion.stop_reason) == (tokenizer.token_text(ids[0]), ids[0])


def test_n_outputs_are_kept_by_index_and_end_together(source, tokenizer):
    def script(request):
        index = int(request.request_id[0])
        return tokenizer.encode("fox " * (index + 1))

    seeds = []
    front, engine = make_front(source), FakeEngine(lambda request: seeds.append(request.seed) or script(request))
    for request in front.submit("r", "hello", SamplingParams(n=3, max_tokens=40, seed=5)):
        engine.add(request)
    assert len(set(seeds)) == 3
    outputs = drain(front, engine)
    assert [output.finished for output in outputs].count(True) == 1
    assert all([completion.index for completion in output.outputs] == [0, 1, 2] for output in outputs)
    assert [completion.text for completion in outputs[-1].outputs] == ["fox ", "fox fox ", "fox fox fox "]
    outputs, _ = run(source, script, SamplingParams(n=3, max_tokens=40, output_kind=RequestOutputKind.DELTA))
    whole = outputs[0]
    for later in outputs[1:]:
        whole.add(later)
    assert [completion.text for completion in whole.outputs] == ["fox ", "fox fox ", "fox fox fox "]


@pytest.mark.parametrize("flat", [False, True])
def test_logprobs_and_prompt_logprobs(source, tokenizer, flat):
    ids = tokenizer.encode("fox fox")
    params = SamplingParams(logprobs=2, prompt_logprobs=1, flat_logprobs=flat)
    outputs, _ = run(source, lambda request: ids, params, width=2)
    output = outputs[-1]
    assert isinstance(output.outputs[0].logprobs, FlatLogprobs) == flat
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    assert list(output.prompt_logprobs[1]) == [output.prompt_token_ids[1], 0]
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(ids)
    assert completion.cumulative_logprob == pytest.approx(-1.5 * len(ids))
    first = completion.logprobs[0]
    assert list(first) == [ids[0], 0, 1]
    assert (first[ids[0]].rank, first[0].rank, first[1].rank) == (7, 1, 2)
    assert first[ids[0]].decoded_token == tokenizer.token_text(ids[0])


def test_delta_logprobs_are_reported_once(source, tokenizer):
    ids = tokenizer.encode("fox fox")
    params = SamplingParams(logprobs=0, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    outputs, _ = run(source, lambda request: ids, params)
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1] * len(ids)
    assert [output.prompt_logprobs is None for output in outputs] == [False] + [True] * (len(ids) - 1)


@pytest.mark.parametrize("flat", [False, True])
def test_delta_prompt_logprobs_of_a_prompt_in_chunks_come_whole_with_the_first_output(source, flat):
    front = make_front(source)
    params = SamplingParams(n=2, prompt_logprobs=0, flat_logprobs=flat, output_kind=RequestOutputKind.DELTA)
    front.submit("r", {"prompt_token_ids": [1, 2, 3, 4]}, params)
    shown = []
    for output in (
        EngineOutput(request_id="0_r", prompt_logprobs=rows([2], 0)),
        EngineOutput(request_id="1_r", token_ids=[7]),
        EngineOutput(request_id="0_r", token_ids=[5], prompt_logprobs=rows([3, 4], 0)),
        EngineOutput(request_id="0_r", token_ids=[6]),
    ):
        shown += front.process([output])[0]
    assert [[list(one.token_ids) for one in output.outputs] for output in shown] == [[[5], [7]], [[6]]]
    assert len(shown[0].prompt_logprobs) == 4
    assert shown[1].prompt_logprobs is None


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_stream_interval_gathers_tokens(source, tokenizer, kind):
    ids = list(range(5, 17))
    params = SamplingParams(n=2, max_tokens=12, output_kind=kind)
    outputs, _ = run(source, lambda request: ids, params, stream_interval=5)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == ([1, 5, 5, 1] if kind == RequestOutputKind.DELTA else [1, 6, 11, 12])
    assert all(len(output.outputs) == 2 for output in outputs)


def test_abort_ends_all_outputs_of_a_request(source, tokenizer):
    front, engine = make_front(source), FakeEngine(lambda request: tokenizer.encode(TEXT))
    for request in front.submit("r", "hello", SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY)):
        engine.add(request)
    front.process(engine.step())
    (output,), ids = front.abort(["r", "unknown"])
    assert ids == ["0_r", "1_r"]
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "abort"]
    assert output.outputs[0].text == tokenizer.token_text(tokenizer.encode(TEXT)[0])
    assert front.process(engine.step()) == ([], [])
    front.submit("r", "hello", SamplingParams())
    with pytest.raises(InvalidRequest, match="'r' is in use"):
        front.submit("r", "hello", SamplingParams())


def test_errors_of_one_request_reach_its_caller(source):
    from frame.interfaces import EngineOutput

    front = make_front(source)
    front.submit("r", "hello", SamplingParams())
    (output,), _ = front.process([EngineOutput(request_id="r", finish_reason="error", error="no logits")])
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].error) == (True, "error", "no logits")


def test_ids_of_outputs_do_not_collide_with_other_requests(source):
    front = make_front(source)
    front.submit("0_r", "hello", SamplingParams())
    with pytest.raises(InvalidRequest, match="'r' needs '0_r', which is in use"):
        front.submit("r", "hello", SamplingParams(n=2))
    front.submit("x", "hello", SamplingParams(n=2))
    with pytest.raises(InvalidRequest, match="in use"):
        front.submit("1_x", "hello", SamplingParams())
    assert front.num_unfinished == 2


def test_a_merged_output_keeps_the_fault_of_the_error():
    first = RequestOutput("r", None, None, None, [CompletionOutput(0, "a", [1])], False)
    error = CompletionOutput(0, "", [], finish_reason="error", error="too long", fault="request")
    first.add(RequestOutput("r", None, None, None, [error], True))
    assert (first.outputs[0].text, first.outputs[0].error, first.outputs[0].fault) == ("a", "too long", "request")


def test_without_a_tokenizer_ids_go_in_and_out():
    front, engine = make_front(source_of(None)), FakeEngine(lambda request: [3, 4, 5])
    for request in front.submit("r", [1, 2], SamplingParams(max_tokens=3)):
        engine.add(request)
    output = drain(front, engine)[-1]
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([3, 4, 5], "")
    with pytest.raises(InvalidRequest, match="no tokenizer is loaded"):
        front.submit("t", "text", SamplingParams())
    with pytest.raises(InvalidRequest, match="no tokenizer is loaded"):
        front.submit("s", [1], SamplingParams(stop="x"))


def test_text_side_speed(source, tokenizer):
    """20,000 tokens a second with streaming, stop strings and 64 requests; a fifth of that on a busy machine."""
    ids = tokenizer.encode(TEXT * 4)[:60]
    front, engine = make_front(source), FakeEngine(lambda request: ids)
    params = SamplingParams(max_tokens=60, stop=["\n\nHuman:"], output_kind=RequestOutputKind.DELTA)
    for number in range(64):
        for request in front.submit(str(number), [5, 6], params):
            engine.add(request)
    batches = []
    while engine.has_unfinished():
        batches.append(engine.step())
    start = time.thread_time()
    for batch in batches:
        front.process(batch)
    tokens_per_second = engine.generated / (time.thread_time() - start)
    print(f"{tokens_per_second:.0f} tokens/s")
    assert tokens_per_second > 4_000
