from __future__ import annotations

import asyncio

import pytest

from frame.core.front.collector import Collector
from frame.core.front.outputs import CompletionOutput, RequestOutput


def output(text: str, *token_ids: int) -> RequestOutput:
    return RequestOutput("a", None, [1], None, [CompletionOutput(0, text, list(token_ids))], False)


async def test_a_waiting_consumer_gets_each_output_and_a_late_one_gets_them_joined() -> None:
    collector = Collector(aggregate=True)
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output("x", 1))
    assert (await waiting).outputs[0].text == "x"
    collector.put(output("y", 2))
    collector.put(output("z", 3))
    late = await collector.get()
    assert (late.outputs[0].text, late.outputs[0].token_ids) == ("yz", [2, 3])


async def test_outputs_before_a_failure_are_not_lost() -> None:
    collector = Collector(aggregate=True)
    collector.put(output("x", 1))
    collector.fail(RuntimeError("the engine is gone"))
    assert (await collector.get()).outputs[0].text == "x"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await collector.get()


async def test_a_cancelled_consumer_leaves_the_outputs_to_the_next() -> None:
    collector = Collector(aggregate=True)
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    collector.put(output("x", 1))
    assert (await collector.get()).outputs[0].text == "x"


async def test_a_second_consumer_is_refused() -> None:
    collector = Collector(aggregate=True)
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two consumers"):
        await collector.get()
    waiting.cancel()
