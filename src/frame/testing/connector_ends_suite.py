"""Checks of connectors where something ends while blocks are read or written: an engine, its memory, what is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from .connected_engine import ConnectedEngine
from .connector_engines import ConnectorEngines
from .engines import request

#: Steps that an engine gets to begin a transfer.
_STEPS = 40


class ConnectorEnds(ConnectorEngines):
    """Part of `ConnectorSuite`."""

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_completion_that_never_comes_leaks_nothing(self, ranks: int) -> None:
        """Nobody takes the blocks of a request, or who began to take them does not go on."""
        giver = self.engine(ranks=ranks)
        taken = self.given(giver, "given", self.prompt(30))
        given_up = self.given(giver, "given up", self.prompt(26, seed=1))
        taker = self.engine(ranks=ranks)
        taker.add(given_up)
        taker.run(until=lambda: bool(taker.loading) or taker.ended("given up"))
        giver.run()
        giver.check()
        taker.engine.abort(["given up"])
        taker.run(taken)
        taker.check("given")
        taker.close()
        giver.close()

    @pytest.mark.parametrize("preempts", [False, True], ids=["as it is", "preempting"])
    def test_reset_while_a_load_is_under_way_waits_or_refuses(self, *, preempts: bool) -> None:
        prompts = [self.prompt(30), self.prompt(41, seed=1), self.prompt(26, seed=2)]
        self.fill(*prompts)
        engine = self.engine()
        engine.add(request("runs", self.prompt(10, seed=3), 60))  # who waits for transfers does so when nothing runs
        _go_on(engine, 2)
        engine.add(request("loads", prompts[0]))
        engine.add(request("loads too", prompts[1]))
        _begin(engine, lambda: bool(engine.loading) or engine.ended("loads"))
        loads, arguments = list(engine.loading), {"reset_connector": True, "reset_running_requests": preempts}
        try:
            done = engine.engine.call("reset_prefix_cache", arguments)
        except RuntimeError:
            done = False  # it refuses
        assert not (done and set(loads) & set(engine.loading)), "reset returned True, but the load goes on"
        engine.run()
        if engine.connector.resets == [True]:
            engine.run(request("after", prompts[2]))
            assert engine.num_cached("after") == 0, "reset returned True, but blocks are still found"
        engine.check()
        engine.close()

    def test_sleep_while_blocks_are_held_waits_or_refuses(self) -> None:
        """The memory of the cache goes, and comes back elsewhere: what is under way must have ended before."""
        prompts = [self.prompt(30), self.prompt(41, seed=1), self.prompt(26, seed=2)]
        self.fill(prompts[0])
        engine = self.engine()
        given = self.given(engine, "given", prompts[1])
        engine.add(request("loads", prompts[0]))
        _begin(engine, lambda: bool(engine.loading) or engine.ended("loads"))
        try:
            engine.engine.call("sleep")
        except RuntimeError:
            pass  # it refuses
        else:
            assert not engine.held, f"the engine sleeps, but blocks of {engine.held} are still held"
            assert not engine.loading, f"the engine sleeps, but blocks of {engine.loading} are still loaded"
            engine.engine.call("wake_up")
        engine.run(request("after", prompts[2]), request("again", prompts[0]))
        engine.check()
        self.serves(engine)
        other = self.engine()
        other.run(given, request("stored", prompts[0]), request("stored too", prompts[2]))
        other.check()
        other.close()
        engine.close()

    @pytest.mark.parametrize("lets_go", [False, True])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_sleep_that_does_not_come_leaves_all_as_it_was(self, ranks: int, lets_go: bool) -> None:
        """Where one worker refuses others were asked, or had let go of memory that they get again as it was."""
        prompts = [self.prompt(30), self.prompt(26, seed=2)]
        self.fill(prompts[0], ranks=ranks)
        engine = self.engine(ranks=ranks)
        engine.add(request("loads", prompts[0]))
        _begin(engine, lambda: bool(engine.loading) or engine.ended("loads"))
        with contextlib.suppress(RuntimeError):  # it refuses
            engine.engine.executor.call("end_transfers")
            if lets_go and not engine.loading:
                engine.engine.executor.call("renew_cache")
        engine.run(request("after", prompts[1]), request("again", prompts[0]))
        engine.check()
        self.serves(engine)
        engine.close()

    @pytest.mark.parametrize("steps", [0, 1, 3])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_consumer_that_dies(self, steps: int, ranks: int) -> None:
        """It dies some steps after it began to take a prompt: the other engine goes on and gives its blocks back."""
        giver = self.engine(ranks=ranks)
        taken = self.given(giver, "given", self.prompt(40))
        taker = self.engine(ranks=ranks)
        taker.add(taken)
        _begin(taker, lambda: bool(taker.loading) or taker.ended("given"))
        _go_on(taker, steps)
        self.kill(taker)
        giver.run(request("after", self.prompt(33, seed=1)), request("again", self.prompt(40)))
        giver.check()
        third = self.engine(ranks=ranks)
        third.run(taken)
        third.check()
        third.close()
        giver.close()

    @pytest.mark.parametrize("steps", [0, 1, 3])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_producer_that_dies(self, steps: int, ranks: int) -> None:
        """It dies before or after the other began to take a prompt: that one loads all of it or computes it."""
        giver = self.engine(ranks=ranks)
        prompts = [self.prompt(40, seed=ranks), self.prompt(37, seed=ranks + 2)]
        late, given = (self.given(giver, name, prompt) for name, prompt in zip(("late", "given"), prompts, strict=True))
        taker = self.engine(ranks=ranks)
        taker.add(given)
        _begin(taker, lambda: bool(taker.loading) or taker.ended("given"))
        _go_on(taker, steps)
        self.kill(giver)
        taker.run(late)
        taker.check()
        taker.close()


def _begin(engine: ConnectedEngine, begun: Callable[[], bool]) -> None:
    """Steps until something has begun, if it does soon."""
    for _ in range(_STEPS):
        if begun():
            return
        engine.step()


def _go_on(engine: ConnectedEngine, steps: int) -> None:
    for _ in range(steps if engine.busy else 0):
        engine.step()
