"""All HTTP routes over an engine of this process, without a server; used by `frame run-batch`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.front.output_parsers import build_parsers
from frame.core.interfaces.client import EngineDeadError
from frame.core.interfaces.serving import Batches
from frame.core.plugin_host.registry import Registry
from frame.core.server.app import build_app, make_endpoints
from frame.core.server.serving import ServingHost
from frame.ranks.client import start_engine


@contextlib.asynccontextmanager
async def open_routes(config: FrameConfig, command: Sequence[str] | None = None) -> AsyncIterator[Batches]:
    """Starts an engine and offers all routes over it; raises `ConfigError` with the cause when it does not start."""
    from frame.core.front.async_front import AsyncFront

    try:
        client = await start_engine(config, command=command)
    except EngineDeadError as error:
        raise ConfigError(str(error)) from None
    try:
        host = ServingHost(config, client)
        checkpoint = read_checkpoint(config)
        registry = Registry.load()
        registry.add_files(config)
        llm = await asyncio.to_thread(lambda: AsyncFront(config, client, checkpoint, registry))
        host.open(llm, build_parsers(llm.front))
        build_app(config, host, [one for one in make_endpoints(config, registry, host) if not one.admin])
        yield host.batches
        llm.shutdown()
    finally:
        await client.close()
