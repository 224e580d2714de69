"""Data ranks agree on the shape of each step; engines with whole experts on each of their ranks step together."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Sequence

import pytest

from frame.core.config.flat import from_flat
from frame.core.interfaces.client import BrokenEngineError
from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry
from frame.core.worker.lockstep import Alone, Lockstep, lockstep_of
from frame.interfaces import (
    API_VERSION,
    AnyShape,
    Mesh,
    Placement,
    Provider,
    SingleGroup,
    StepShape,
    UnconnectedGroup,
    WorkerProtocol,
)
from frame.testing import ThreadExecutor, run_mesh
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, prompts, request, running, tokens_of

IDLE = StepShape(0, 0)
DECODE = StepShape(3, 3, max_seq_len=20)
PROMPT = StepShape(40, 2, max_query_len=38, max_seq_len=38)


class Padded(AnyShape):
    """Decodes run at the size of the largest."""

    def join(self, shapes: Sequence[StepShape]) -> StepShape | None:
        sizes = [shape.padded_tokens for shape in shapes]
        decodes = all(shape.max_query_len == 1 for shape in shapes)
        return StepShape(max(sizes), max(sizes), deterministic=shapes[0].deterministic) if decodes else None


def agreed(*given, shapes=AnyShape):
    """What the ranks agree on, rank by rank."""
    mesh = Mesh(data=len(given), expert_parallel=True)
    counted = []

    def agree(groups):
        return Lockstep(groups.data, shapes(), counted.append).agree(given[groups.data.rank])

    found = run_mesh(mesh, agree)
    assert counted == ["data"] * len(given)
    assert len({one.busy for one in found}) == 1
    return found[0].busy, [one.shape for one in found]


def test_without_rows_nothing_is_run():
    assert agreed(IDLE, IDLE) == (False, [IDLE, IDLE])


def test_each_rank_runs_at_its_own_shape_and_knows_the_others_tokens():
    busy, (prompt, decode, idle) = agreed(PROMPT, DECODE, IDLE)
    assert busy
    assert {shape.tokens_per_rank for shape in (prompt, decode, idle)} == {(40, 3, 0)}
    assert (prompt.padded_tokens, prompt.max_query_len) == (40, 38)
    assert (decode.padded_rows, decode.max_seq_len) == (3, 20)
    assert (idle.padded_tokens, idle.padded_rows) == (0, 0)


def test_a_platform_may_have_all_run_at_one_shape():
    small = StepShape(1, 1, max_seq_len=9)
    assert agreed(DECODE, IDLE, small, shapes=Padded) == (True, [StepShape(3, 3)] * 3)
    assert agreed(DECODE, PROMPT, shapes=Padded)[1][0].tokens_per_rank == (3, 40)


def test_a_deterministic_request_makes_the_step_so_for_all():
    """Its tokens visit the experts of other ranks."""
    exact = StepShape(2, 2, deterministic=True)
    for shapes in (AnyShape, Padded):
        assert all(shape.deterministic for shape in agreed(DECODE, exact, IDLE, shapes=shapes)[1])


def test_a_rank_keeps_what_its_shape_says():
    """With every field that others need not know set to what is no default."""
    own = StepShape(40, 2, 3, 38, 38, shared=True, adapted=True)
    shape = agreed(own, DECODE)[1][0]
    assert dataclasses.replace(shape, tokens_per_rank=()) == own


def test_who_has_no_peers_is_alone():
    for group in (SingleGroup(), UnconnectedGroup(0, 2)):
        alone = lockstep_of(group, AnyShape(), print)
        assert type(alone) is Alone
        assert alone.agree(DECODE) == (DECODE, False)


class Rank:
    """An engine of a data rank, in a thread of its own; its workers are threads too."""

    def __init__(self, folder, rank, mesh, rendezvous, ask, **settings):
        self.messages = queue.SimpleQueue()
        self._rank, self._mesh, self._rendezvous, self._ask = rank, mesh, rendezvous, ask
        self.num_steps, self._error = 0, None
        self._values = {**SMALL, "model": str(folder), "num_threads": 1, "executor": "of-a-rank"}
        self._values |= {"tensor_parallel_size": mesh.tensor, "enable_expert_parallel": True, **settings}
        self.ready, self.tokens = threading.Event(), {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def make_executor(self):
        mesh, rank, rendezvous = self._mesh, self._rank, self._rendezvous

        class OfARank(ThreadExecutor):
            def make(self, placement: Placement) -> WorkerProtocol:
                place = rank * mesh.engine_size + placement.rank
                return super().make(Placement(rank=place, local_rank=place, mesh=mesh, rendezvous=rendezvous))

        return OfARank

    def _run(self):
        try:
            self._serve()
        except BaseException as error:
            self._error = error
            self.ready.set()

    def _serve(self):
        registry = Registry.load()
        provider = Provider("of-a-rank", "tests:OfARank", api=f"=={API_VERSION}")
        registry.offers.append(Offer("executor", provider, HERE, ""))
        registry._resolved["tests:OfARank"] = self.make_executor()
        with running(from_flat(self._values), registry) as engine:
            engine.step_with_peers(self._ask)
            self.ready.set()
            ending = False
            while not ending or engine.has_unfinished():  # the last steps of a wave need all engines
                busy = ending or engine.has_unfinished()
                try:
                    message = self.messages.get(block=not busy)
                except queue.Empty:
                    pass
                else:
                    if message is not None:
                        message(engine)
                    ending |= message is None
                    continue
                for output in engine.step():
                    assert output.error is None, output.error
                    self.tokens.setdefault(output.request_id, []).append(output)
            self.num_steps = engine.scheduler._num_steps
            self.quiet = not engine.has_unfinished()

    def end(self):
        self.messages.put(None)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the engine waits for another"
        if self._error is not None:
            raise self._error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3-moe")


@pytest.mark.some(2)
@pytest.mark.parametrize("exchange", ["gather", "all-to-all"])
@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (2, 2)])
def test_engines_that_share_experts_give_the_tokens_of_one(folder, tmp_path, data, tensor, exchange):
    """One engine has most requests and the last one none; they come while others run, and after a pause."""
    given = prompts(400)
    wanted = [request(f"{place}", prompt, 5 + 2 * place) for place, prompt in enumerate(given)]
    values = {**SMALL, "model": str(folder), "num_threads": 1}
    with running(from_flat(values), Registry.load()) as engine:
        expected = {name: tokens_of(found) for name, found in drain(engine, wanted).items()}
    ranks = started(folder, tmp_path, Mesh(data=data, tensor=tensor, expert_parallel=True), exchange)
    for place, one in enumerate(wanted):
        ranks[place % 3 == 2].messages.put(lambda engine, one=one: engine.add(one))
    found = wait_for(ranks, len(wanted))
    again = request("again", given[0], 5)
    ranks[1].messages.put(lambda engine: engine.add(again))
    found = wait_for(ranks, len(wanted) + 1)
    for rank in ranks:
        rank.end()
    assert {name: found[name] for name in expected} == expected
    assert found["again"] == expected["0"]
    assert len({rank.num_steps for rank in ranks}) == 1, "all launched equally many steps"


def started(folder, tmp_path, mesh, exchange="gather", **settings):
    """An engine for each data rank of `mesh`, ready for requests."""
    ranks: list[Rank] = []

    def ask(number: int) -> None:
        for rank in ranks:
            rank.messages.put(lambda engine: engine.call("begin_wave", {"number": number}))

    for rank in range(mesh.data):
        given = {"expert_exchange": exchange, **settings}
        ranks.append(Rank(folder, rank, mesh, f"file://{tmp_path}/store", ask, **given))
    for rank in ranks:
        assert rank.ready.wait(60)
    return ranks


def test_an_engine_that_is_paused_serves_the_others(folder, tmp_path):
    """Its own requests wait meanwhile."""
    given = prompts(400)
    ranks = started(folder, tmp_path, Mesh(data=2, expert_parallel=True))
    ranks[0].messages.put(lambda engine: engine.add(request("held", given[1], 90)))
    wait_until(lambda: "held" in ranks[0].tokens, ranks)
    ranks[0].messages.put(lambda engine: engine.call("pause", {"mode": "keep"}))
    ranks[1].messages.put(lambda engine: engine.add(request("other", given[2], 20)))
    assert len(wait_for(ranks, 1)["other"]) == 20
    held = len(tokens_of(ranks[0].tokens["held"]))
    assert held < 90
    ranks[0].messages.put(lambda engine: engine.call("resume"))
    assert len(wait_for(ranks, 2)["held"]) == 90
    for rank in ranks:
        rank.end()
    assert len({rank.num_steps for rank in ranks}) == 1


def test_a_failed_step_ends_the_engine(folder, tmp_path):
    """Others wait in the middle of it: no part of it can be tried again alone."""
    mesh = Mesh(data=1, expert_parallel=True)
    (rank,) = started(folder, tmp_path, mesh)

    def breaks(engine):
        def execute(plan):
            raise ValueError("out of luck")

        engine.executor.execute = execute
        engine.add(request("a", [3, 4, 5]))

    rank.messages.put(breaks)
    with pytest.raises(BrokenEngineError, match="other engines wait for this one: out of luck"):
        wait_for([rank], 1)


def wait_until(done, ranks):
    pause = threading.Event()
    for _ in range(6000):
        if done():
            return
        for rank in ranks:
            if rank._error is not None:
                raise rank._error
        pause.wait(0.01)
    raise TimeoutError("the engines do not get there")


def wait_for(ranks, count):
    """The tokens of `count` requests, once all have ended."""

    def ended():
        found = [one for rank in ranks for one in list(rank.tokens.values())]
        return sum(outputs[-1].finish_reason is not None for outputs in found) == count

    wait_until(ended, ranks)
    return {name: tokens_of(found) for rank in ranks for name, found in rank.tokens.items()}
