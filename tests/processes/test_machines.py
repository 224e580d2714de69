"""The server's side of engines of other machines, with machines that say what real ones would not."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from frame.core.config.checkpoint import DEMO_FOLDER
from frame.core.config.tree import FrameConfig
from frame.core.config.weight_source import with_weights
from frame.core.interfaces.client import EngineDeadError
from frame.core.processes.channel import AsyncChannel
from frame.core.processes.messages import (
    Admitted,
    Dismissed,
    EngineDown,
    EngineUp,
    Failed,
    MachineOrder,
    Refused,
    Stage,
)
from frame.links.description import described
from frame.links.greeting import connect_async
from frame.links.machines import Machines
from tests.free_ports import free_ports
from tests.server.fake_engine import FakeEngine

INFO = FakeEngine(FrameConfig()).info


class Server:
    """A server that waits for engines 1 and 2 of 3, and the news of them."""

    def __init__(self, folder: Path, seconds: float = 60.0) -> None:
        secret = folder / "secret"
        secret.write_text("a secret of these tests")
        self.config = FrameConfig.from_flat(
            data_parallel_size=3, data_parallel_size_local=1, data_parallel_address="127.0.0.1",
            data_parallel_rpc_port=free_ports(), data_parallel_secret_file=str(secret), ready_seconds=seconds,
        )  # fmt: skip
        self.news: list[Any] = []
        self.machines = Machines(self.config, self._add, lambda: self.config)

    async def _add(self, message: Any) -> None:
        self.news.append(message)

    async def machine(self, **changes: Any) -> tuple[AsyncChannel, Any]:
        """A machine that says of itself what a real one would, except for `changes`, and what it is answered."""
        parallel = self.config.data_parallel
        said = {**described(self.config), "ranks": [1, 2], **changes}
        connection = await connect_async("127.0.0.1", parallel.data_parallel_rpc_port, parallel.key(), said)
        channel = await AsyncChannel.wrap(connection, MachineOrder)
        return channel, await channel.receive()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path)
    server.machines.listen()
    yield server
    await server.machines.stop()


async def test_a_start_ends_when_all_engines_of_all_machines_are_ready(server: Server) -> None:
    start = asyncio.create_task(server.machines.start())
    first, order = await server.machine(ranks=[2])
    assert order == Admitted()
    second, order = await server.machine(ranks=[1])
    assert order == Admitted()
    await first.send(EngineUp("tcp://127.0.0.1:1/a", INFO, 2))
    await second.send(Stage("weights", 0.1, 1))
    await server.until(lambda: len(server.news) == 2)
    assert not start.done()
    await second.send(EngineUp("tcp://127.0.0.1:1/b", INFO, 1))
    await start
    end = asyncio.create_task(server.machines.wait())
    first.close()
    await server.until(lambda: isinstance(server.news[-1], EngineDown))
    assert server.news[-1] == EngineDown("the machine at 127.0.0.1 is gone", final=True, rank=2, away=True)
    assert not end.done(), "the other machine serves on"
    await second.send(Failed("no memory"))
    await end
    await server.until(lambda: server.news[-1].rank == 1)
    assert server.news[-1].error == "the machine at 127.0.0.1 is gone: no memory"
    second.close()


async def test_machines_are_told_when_the_server_ends(server: Server) -> None:
    channel, _ = await server.machine()
    await server.machines.stop()
    assert await channel.receive() == Dismissed()
    assert await channel.receive() is None
    channel.close()


async def test_a_machine_that_leaves_before_its_engines_are_ready_gets_the_time_again(tmp_path: Path) -> None:
    server = Server(tmp_path, 1.5)
    server.machines.listen()
    start = asyncio.create_task(server.machines.start())
    channel, _ = await server.machine()
    await asyncio.sleep(1.8)
    assert not start.done(), "the engines may take as long as their own machine lets them"
    channel.close()
    with pytest.raises(EngineDeadError, match=r"with engines 1, 2 of 3 within 1.5 seconds \(ready_seconds\)"):
        await start
    await server.machines.stop()
    assert server.news == []


async def test_another_version_is_named(server: Server) -> None:
    said = described(server.config)["versions"]
    channel, order = await server.machine(versions={**said, "torch": "1.0"})
    assert order == Refused(
        f"the machine at 127.0.0.1 has torch 1.0, the server {said['torch']}; all machines need the same"
    )
    channel.close()


async def test_a_machine_needs_the_weights_that_the_server_serves_by_now(server: Server, tmp_path: Path) -> None:
    said = described(server.config)["settings"]
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "new")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-256] + bytes(256))
    server.config = with_weights(server.config, str(folder))
    channel, order = await server.machine(settings=said)
    assert isinstance(order, Refused)
    assert "was given the file model.safetensors" in order.reason
    channel.close()
    channel, order = await server.machine()
    assert order == Admitted()
    channel.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(st.none() | st.booleans() | st.integers(-3, 5) | st.text(max_size=3), st.lists, max_leaves=4))
def test_only_ranks_that_are_waited_for_are_admitted(tmp_path: Path, ranks: Any) -> None:
    async def ask() -> Any:
        server = Server(tmp_path)
        server.machines.listen()
        channel, order = await server.machine(ranks=ranks)
        channel.close()
        await server.machines.stop()
        return order

    fits = (
        isinstance(ranks, list)
        and ranks
        and all(type(one) is int for one in ranks)
        and ranks in ([1], [2], [1, 2], [2, 1])
    )
    assert isinstance(asyncio.run(ask()), Admitted if fits else Refused)


@pytest.mark.parametrize("what", ["another rank", "too much", "nonsense"])
async def test_a_machine_that_says_what_it_may_not_is_cut_off(server: Server, what: str) -> None:
    channel, _ = await server.machine(ranks=[1])
    said = {
        "another rank": EngineDown("x", rank=2),
        "too much": EngineDown("x" * (1 << 20), rank=1),
        "nonsense": {"type": "Nonsense"},
    }
    await channel.send(said[what])
    with contextlib.suppress(ConnectionResetError):
        assert await channel.receive() is None
    assert server.news == []
    channel.close()
    other, order = await server.machine(ranks=[1])
    assert order == Admitted()
    other.close()
