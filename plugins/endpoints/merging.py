"""Several streams as one stream, and several awaitables as one, for requests with several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all streams as they arrive, each with the number of its stream.

    Closes all streams at the end. The first one that fails ends the others, and its exception is raised.
    """
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await streams[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def drain(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((number, item))
            queue.put_nowait(None)
        except Exception as error:  # raised again by the consumer
            queue.put_nowait(error)
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(drain(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
