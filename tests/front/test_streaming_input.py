"""A prompt that grows while its request runs, over a fake engine."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from frame import SamplingParams, StreamingInput
from frame.core.front.prompts import InvalidRequest
from frame.interfaces import EngineDeadError, PoolingParams, RequestOutputKind

from .test_async_llm import DELTA, collect, make, running  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=3, output_kind=DELTA)


async def pieces(*given, wait=None):
    for place, one in enumerate(given):
        if wait is not None and place:
            await wait()
        yield one


def counting(request):
    """Three tokens that say how many the model has read."""
    first = 30 + len(request.prompt_ids)
    return range(first, first + 3)


def asked(client):
    """Notes every request that reaches the engine."""
    seen, add = [], client.engine.add

    def noted(request):
        seen.append(request)
        add(request)

    client.engine.add = noted
    return seen


async def test_each_piece_follows_the_answer_to_the_one_before_without_its_last_token(make):  # noqa: F811
    llm, client = make(counting)
    seen = asked(client)
    outputs = await collect(llm.generate(pieces([5, 6, 7], StreamingInput([8, 9]), [10]), GREEDY, "a"))
    assert [one.prompt_ids.tolist() for one in seen] == [
        [5, 6, 7],
        [5, 6, 7, 33, 34, 8, 9],
        [5, 6, 7, 33, 34, 8, 9, 37, 38, 10],
    ]
    assert [one.follows for one in seen] == ["", "a/1", "a/2"]
    assert [one.request_id for one in seen] == ["a/1", "a/2", "a/3"]
    assert {one.request_id for one in outputs} == {"a"}
    assert [token for one in outputs for token in one.outputs[0].token_ids] == [33, 34, 35, 37, 38, 39, 40, 41, 42]
    assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [one.outputs[0].finish_reason for one in outputs if one.outputs[0].finish_reason] == ["length"] * 3
    assert outputs[-1].prompt_token_ids == seen[-1].prompt_ids.tolist()
    assert client.engine.calls[-1] == ("end_session", {"request_id": "a/3"})
    assert not llm.front._records
    assert not llm._sessions._sessions


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
async def test_cumulative_outputs_go_on_over_the_pieces(make, kind):  # noqa: F811
    llm, _ = make(counting, width=1)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, output_kind=kind)
    outputs = await collect(llm.generate(pieces([5, 6, 7], [8, 9]), params, "a"))
    last = outputs[-1].outputs[0]
    assert last.token_ids == [33, 34, 35, 37, 38, 39]
    assert last.text == "".join(one.decoded_token for row in last.logprobs for one in row.values())
    assert last.cumulative_logprob == pytest.approx(6 * -1.5)
    lengths = [len(one.outputs[0].token_ids) for one in outputs]
    assert lengths == sorted(lengths)
    if kind == RequestOutputKind.FINAL_ONLY:
        assert lengths == [3, 6]


async def test_a_piece_may_have_its_own_parameters(make):  # noqa: F811
    llm, client = make(counting)
    seen = asked(client)
    read_only = SamplingParams(max_tokens=1, output_kind=DELTA)
    given = pieces(StreamingInput([5, 6], read_only), StreamingInput([7], read_only), [8])
    outputs = await collect(llm.generate(given, GREEDY, "a"))
    assert [one.prompt_ids.tolist() for one in seen] == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert [one.max_tokens for one in seen] == [1, 1, 3]
    assert [token for one in outputs for token in one.outputs[0].token_ids][2:] == [34, 35, 36]


async def test_texts_are_tokenised_one_by_one_the_first_with_special_tokens(make, tokenizer):  # noqa: F811
    llm, client = make(counting)
    seen = asked(client)
    params = SamplingParams(max_tokens=1, output_kind=DELTA)
    await collect(llm.generate(pieces({"prompt": "hello", "cache_salt": "s"}, " you"), params, "a"))
    first, later = tokenizer.encode("hello"), tokenizer.encode(" you", add_special_tokens=False)
    assert [one.prompt_ids.tolist() for one in seen] == [first, first + later]
    assert {one.salt for one in seen} == {"s"}


async def test_the_end_of_the_prompt_may_come_after_the_last_answer(make):  # noqa: F811
    llm, client = make(counting)
    over = asyncio.Event()

    async def slow():
        yield [5, 6]
        await over.wait()

    outputs = []
    async for output in llm.generate(slow(), GREEDY, "a"):
        outputs.append(output)
        assert output.finished == over.is_set()
        if output.outputs[0].finish_reason:
            assert not client.engine.requests
            over.set()
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].token_ids == []
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_few_pieces_are_read_ahead(make):  # noqa: F811
    llm, client = make(counting)
    read = []

    async def many():
        for place in range(1000):
            read.append(place)
            yield [5]

    client.stepping.clear()
    stream = llm.generate(many(), SamplingParams(max_tokens=1, output_kind=DELTA), "a")
    first = asyncio.create_task(anext(stream))
    await running(client)
    for _ in range(100):
        await asyncio.sleep(0)
    assert 1 < len(read) <= 18
    client.stepping.set()
    await first
    await stream.aclose()


async def test_an_error_of_the_pieces_comes_after_the_answers_before_it(make):  # noqa: F811
    llm, client = make(counting)

    async def broken():
        yield [5, 6]
        raise OSError("the microphone is gone")

    outputs = []

    async def read():
        async for output in llm.generate(broken(), GREEDY, "a"):
            outputs.append(output)

    with pytest.raises(OSError, match="the microphone is gone"):
        await read()
    assert [token for one in outputs for token in one.outputs[0].token_ids] == [32, 33, 34]
    assert client.engine.calls[-1] == ("end_session", {"request_id": "a/1"})
    assert not llm._sessions._sessions


async def test_closing_the_stream_ends_the_pieces_and_the_request(make):  # noqa: F811
    llm, client = make(counting, pause=0.01, width=1)
    closed = asyncio.Event()

    async def endless():
        try:
            while True:
                yield [5]
                await asyncio.sleep(0)
        finally:
            closed.set()

    stream = llm.generate(endless(), GREEDY, "a")
    await anext(stream)
    await stream.aclose()
    assert closed.is_set()
    assert client.engine.aborted == ["a/1"]
    assert client.engine.calls[-1] == ("end_session", {"request_id": "a/1"})


@pytest.mark.parametrize("answered", [False, True])
async def test_abort_ends_it_while_it_runs_and_while_it_waits(make, answered):  # noqa: F811
    llm, client = make(counting)

    async def waiting():
        yield [5, 6]
        await asyncio.Event().wait()

    if not answered:
        client.stepping.clear()
    task = asyncio.create_task(collect(llm.generate(waiting(), GREEDY, "a")))
    await running(client)
    while answered and client.engine.requests:
        await asyncio.sleep(0.001)
    await llm.abort(["a", "unknown"])
    outputs = await asyncio.wait_for(task, 60)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert [one.finished for one in outputs[:-1]] == [False] * (len(outputs) - 1)


async def test_shutdown_ends_it_while_it_waits(make):  # noqa: F811
    llm, _ = make(counting)

    async def waiting():
        yield [5, 6]
        await asyncio.Event().wait()

    stream = llm.generate(waiting(), GREEDY, "a")
    while (await anext(stream)).outputs[0].finish_reason is None:
        pass
    llm.shutdown()
    assert (await anext(stream)).outputs[0].finish_reason == "abort"
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await anext(llm.generate(pieces([5]), GREEDY, "b"))


async def test_without_an_engine_the_next_piece_says_so(make):  # noqa: F811
    llm, client = make(counting)

    async def dying():
        yield [5, 6]
        await client.die("the device is gone")
        yield [7]

    with pytest.raises(EngineDeadError, match="the device is gone"):
        async for _ in llm.generate(dying(), SamplingParams(max_tokens=1, output_kind=DELTA), "a"):
            pass


async def test_an_answer_that_failed_ends_it(make):  # noqa: F811
    llm, client = make(counting)
    client.stepping.clear()
    task = asyncio.create_task(collect(llm.generate(pieces([5, 6], [7]), GREEDY, "a")))
    await running(client)
    await client.die("the device is gone")
    outputs = await asyncio.wait_for(task, 60)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].error == "the device is gone"


async def test_an_id_that_is_in_use_is_refused(make):  # noqa: F811
    llm, client = make(counting)
    client.stepping.clear()
    first = asyncio.create_task(collect(llm.generate(pieces([5, 6]), GREEDY, "a")))
    await running(client)
    with pytest.raises(InvalidRequest, match="request id 'a' is in use by an unfinished request"):
        llm.generate([1], GREEDY, "a")
    second = asyncio.create_task(collect(llm.generate([1], GREEDY, "b")))
    await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequest, match="request id 'b' is in use by an unfinished request"):
        await collect(llm.generate(pieces([5, 6]), GREEDY, "b"))
    client.stepping.set()
    await asyncio.gather(first, second)


@pytest.mark.parametrize(
    ("given", "params", "message"),
    [
        ([], GREEDY, "the prompt ended without a piece; give at least one"),
        ([[]], GREEDY, "piece 0 of the prompt is empty; give at least one token"),
        ([[5], ""], GREEDY, "piece 1 of the prompt is empty; give at least one token"),
        ([[5], object()], GREEDY, "a prompt must be text, token ids or a dict of either, got object"),
        ([{"prompt_embeds": np.zeros((2, 4), "float32")}], GREEDY, "piece 0 of the prompt has prompt_embeds"),
        ([[5], {"prompt_token_ids": [6], "cache_salt": "x"}], GREEDY, "piece 1 of the prompt has another cache_salt"),
        ([[5], StreamingInput([6], SamplingParams())], GREEDY, "piece 1 of the prompt has another output_kind"),
        ([[5], StreamingInput([6], SamplingParams(n=2))], GREEDY, "a prompt in pieces has one output, but n is 2"),
        ([[5]], SamplingParams(n=3), "a prompt in pieces has one output, but n is 3"),
        ([[5]], SamplingParams(prompt_logprobs=1), "prompt_logprobs is not for a prompt in pieces; leave it out"),
        ([[5]], SamplingParams(truncate_prompt_tokens=1), "truncate_prompt_tokens is not for a prompt in pieces"),
        ([[5]], PoolingParams(), "a prompt in pieces needs SamplingParams, got PoolingParams"),
        ([[5] * 40, [5] * 40], GREEDY, "the prompt has 82 tokens, but the model takes 64"),
        ([[5], {"encoder_prompt": [6], "decoder_prompt": [7]}], GREEDY, "piece 1 of the prompt: the model has no enc"),
    ],
)  # fmt: skip
async def test_what_it_cannot_have_is_named(make, given, params, message):  # noqa: F811
    llm, client = make(counting)
    with pytest.raises(InvalidRequest, match=message):
        await collect(llm.generate(pieces(*given), params, "a"))
    assert not client.engine.requests
    assert not llm._sessions._sessions
    assert (await collect(llm.generate(pieces([5]), GREEDY, "a")))[-1].finished


async def test_kv_transfer_is_refused(make):  # noqa: F811
    llm, _ = make(counting)
    with pytest.raises(InvalidRequest, match="kv_transfer is not for a prompt in pieces; leave it out"):
        await collect(llm.generate(pieces([5]), GREEDY, "a", kv_transfer={"x": 1}))


@pytest.mark.parametrize("news", ["piece", "error"])
async def test_what_comes_with_an_abort_is_dropped(make, news):  # noqa: F811
    llm, client = make(counting)
    seen, given = asked(client), asyncio.Queue()

    async def waiting():
        yield [5, 6]
        piece = await given.get()
        if news == "error":
            raise OSError("the microphone is gone")
        yield piece

    outputs = []
    async for output in llm.generate(waiting(), GREEDY, "a"):
        outputs.append(output)
        if output.outputs[0].finish_reason == "length":
            asyncio.get_running_loop().call_soon(given.put_nowait, [7])
            aborting = asyncio.get_running_loop().create_task(llm.abort("a"))
    await aborting
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(seen) == 1


async def test_after_a_refused_piece_the_engine_keeps_nothing_of_the_one_before(make):  # noqa: F811
    llm, client = make(counting)
    with pytest.raises(InvalidRequest, match="the prompt has 82 tokens"):
        await collect(llm.generate(pieces([5] * 40, [5] * 40), GREEDY, "a"))
    ended = [arguments["request_id"] for method, arguments in client.engine.calls if method == "end_session"]
    assert ended == ["a/1", "a/2"]


async def test_a_model_with_an_encoder_takes_no_pieces(make):  # noqa: F811
    llm, client = make(counting)
    llm.front.info = msgspec.structs.replace(llm.front.info, encodes=True)
    with pytest.raises(InvalidRequest, match="a prompt in pieces is not for a model with an encoder and a decoder"):
        await collect(llm.generate(pieces([5]), GREEDY, "a"))
    assert not client.engine.requests


async def test_a_task_that_is_cancelled_twice_tells_the_engine_of_the_end(make):  # noqa: F811
    llm, client = make(counting)
    answered = asyncio.Event()

    async def waiting():
        yield [5, 6]
        await asyncio.Event().wait()

    async def read():
        async for output in llm.generate(waiting(), GREEDY, "a"):
            if output.outputs[0].finish_reason:
                answered.set()

    task = asyncio.create_task(read())
    await answered.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert ("end_session", {"request_id": "a/1"}) in client.engine.calls
