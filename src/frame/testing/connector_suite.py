"""The contract of KV connectors: both sides under frame's own scheduler, over a fake worker that checks its cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from frame.core.interfaces.connector import ConnectorScheduler, ConnectorWorker, RequestView
from frame.core.interfaces.step import StepPlan, TransferReport

from .checked_connector import CheckedConnector
from .connector_ends_suite import ConnectorEnds
from .connector_ranks_suite import ConnectorRanks
from .connector_states_suite import STATES, ConnectorStates
from .engines import SMALL, drain, request, running, tokens_of
from .fake_cache import make_layout
from .fake_worker import FakeWorker
from .tiny import write_tiny


class ConnectorSuite(ConnectorRanks, ConnectorEnds, ConnectorStates):
    """The contract of `frame.interfaces.ConnectorScheduler` and `ConnectorWorker`.

        class TestMine(ConnectorSuite):
            plugin = "mine"            # or target = "mine:Scheduler", tags = {"worker": "mine:Worker"}
            options = {"level": 3}     # options of type Path get an empty folder; all engines of a test share it
            stores = True              # False when no engine can find later what another one computed

    Runs frame's scheduler and both sides of the connector over a fake worker whose cache holds facts: a block that is
    wrong, late or lost changes the tokens. The provider's tag "stores" ("no") stands for `stores`. Override `damage`
    and `damage_one` when what is stored is not files below a `Path` option, `kill` where `close` of both sides is
    kinder than a death, and `serves` where an engine must be told of others. `produces` (or, as JSON, the tag of that
    name) are the `kv_transfer` parameters of a request whose blocks another engine is to take, which is given those of
    the answer. Transfers that end without a step, as leases do, get `patience_seconds`.
    """

    layouts: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "full": {},
        "full and sliding": {"windows": (0, 6)},
        "one token a block": {"block_size": 1, "num_blocks": 200},
        "groups of unequal blocks": {"windows": (0, 6, 0), "strides": (2, 1, 4)},
        "chunked": {"windows": (0,), "chunks": (8,)},
        "latent": {"windows": (), "latents": 2},
        **STATES,
    }

    def test_both_sides_derive_from_their_interfaces(self) -> None:
        assert issubclass(self.found(), ConnectorScheduler)
        assert issubclass(self.found("worker"), ConnectorWorker)

    def test_nothing_is_found_where_nothing_is_stored(self) -> None:
        layout = make_layout()
        side = CheckedConnector(self.scheduler_side(self.config(kv_connector=self.name), layout))
        hashes = [bytes([index]) * 32 for index in range(5)]
        view = RequestView(request_id="a", token_ids=self.prompt(), block_hashes=hashes, prompt_len=22)
        for _ in range(50):
            answer = side.matched_tokens(view, 0)
            if answer[0] is not None:
                break
        assert answer == (0, False), f"an empty place gave {answer}"
        side.finished(view, [[]])  # aborted before it got blocks
        side.close()

    def test_steps_without_tokens_are_accepted(self) -> None:
        layout = make_layout()
        config = self.config(kv_connector=self.name)
        side, worker = CheckedConnector(self.scheduler_side(config, layout)), FakeWorker(layout)
        worker.connector = lambda layout: self.worker_side(config, layout)
        worker.load()
        worker.allocate(layout)
        hooks = worker.transfer.hooks
        for step in range(3):
            plan = empty_plan(step)
            message = side.build_message(plan)
            worker.transfer.begin_step(message)
            report = worker.transfer.end_step(["never-heard-of"] if step == 1 else [])
            assert isinstance(report, TransferReport), f"end_step must give a TransferReport, gave {report!r}"
            assert not report.received, "a transfer was reported that nobody asked for"
            side.update(report)
        worker.transfer.begin_step(b"")
        worker.transfer.end_step([])
        assert isinstance(worker.transfer.handshake(), bytes)
        assert worker.transfer.hooks is hooks, "hooks must stay: whether steps are captured was decided by them"
        worker.close()
        side.close()

    @pytest.mark.parametrize("shape", layouts.values(), ids=layouts.keys())
    def test_a_reloaded_prompt_gives_the_tokens_of_a_cold_one(self, shape: Mapping[str, Any]) -> None:
        layout = self.needs(make_layout(**shape))
        prompts = [self.prompt(), self.prompt(40, seed=1), self.prompt(3, seed=2), self.prompt(16, seed=3)]
        self.fill(*prompts, layout=layout)
        engine = self.engine(layout)
        engine.run(*(request(str(index), prompt) for index, prompt in enumerate(prompts)))
        engine.check()
        if self.shares:
            for index in (0, 1):
                count, found = len(prompts[index]), engine.num_cached(str(index))
                assert found > 0, f"another engine computed this prompt of {count} tokens, and nothing was found"
                assert found < count, "at least one prompt token is always computed"
        engine.close()

    def test_the_common_beginning_is_found_and_no_more(self) -> None:
        self.needs_storage()
        self.fill(self.prompt(21))
        engine = self.engine()
        engine.run(request("longer", self.prompt(10) + self.prompt(20, seed=5)), request("other", self.prompt(20, 6)))
        engine.check()
        assert engine.num_cached("longer") == 8, "two blocks of four tokens are common"
        assert engine.num_cached("other") == 0, "blocks of another prompt were taken"
        engine.close()

    def test_blocks_are_not_shared_across_salts_or_models(self) -> None:
        self.fill(self.prompt())
        salted = request("salted", self.prompt())
        salted.salt = "mine"
        for layout, one in ((make_layout(), salted), (make_layout(model="other"), request("a", self.prompt()))):
            engine = self.engine(layout)
            engine.run(one)
            engine.check()
            assert engine.num_cached(one.request_id) == 0, "blocks were taken of other tokens"
            engine.close()

    def test_chunks_and_many_requests(self) -> None:
        prompts = [self.prompt(length, seed=length % 3) for length in (5, 40, 17, 33, 8, 24, 9, 40)]
        self.fill(*prompts, max_num_batched_tokens=7)
        engine = self.engine(max_num_batched_tokens=7)
        engine.run(*(request(str(index), prompt) for index, prompt in enumerate(prompts)))
        engine.check()
        engine.close()

    def test_preempted_requests_get_new_blocks(self) -> None:
        """A pool that is too small for all: blocks are given out again, for the same request too."""
        prompts = [self.prompt(20, seed=seed) for seed in range(4)]
        self.fill(*prompts)
        engine = self.engine(make_layout(num_blocks=22))
        engine.run(*(request(str(index), prompt, 24) for index, prompt in enumerate(prompts)))
        engine.check()
        assert engine.engine.stats().preemptions > 0, "frame's own fault: nothing was preempted"
        engine.close()

    def test_aborted_requests_give_everything_back(self) -> None:
        self.fill(self.prompt(40))
        for steps in range(6):
            engine = self.engine()
            engine.add(request("goes", self.prompt(40)))
            engine.add(request("stays", self.prompt(30)))
            for _ in range(steps):
                engine.step()
            engine.engine.abort(["goes"])
            engine.run()
            engine.check("stays")
            engine.close()

    @pytest.mark.parametrize("shape", [{}, STATES["states"]], ids=["tokens", "states"])
    def test_a_step_that_failed_publishes_nothing(self, shape: Mapping[str, Any]) -> None:
        prompt, layout = self.prompt(30), self.needs(make_layout(**shape))
        engine = self.engine(layout, broken_steps=[0], max_num_batched_tokens=64)
        engine.run(request("broken", prompt))
        assert engine.outputs["broken"][-1].finish_reason == "error"
        engine.run(request("later", self.prompt(30, seed=9)))
        engine.check("later")
        engine.close()
        engine = self.engine(layout)
        engine.run(request("again", prompt))
        engine.check()
        assert engine.num_cached("again") == 0, "blocks of a step that failed were found"
        engine.close()

    @pytest.mark.parametrize("shape", [{}, STATES["states"]], ids=["tokens", "states"])
    def test_blocks_that_are_damaged_are_computed_again(self, shape: Mapping[str, Any]) -> None:
        self.needs_storage()
        prompts, layout = [self.prompt(30), self.prompt(25, seed=1)], self.needs(make_layout(**shape))
        self.fill(*prompts, layout=layout)
        if not self.damage():
            pytest.skip("nothing was damaged: override damage() for what is stored elsewhere")
        for _ in range(2):
            engine = self.engine(layout)
            engine.run(*(request(str(index), prompt) for index, prompt in enumerate(prompts)))
            engine.check()
            engine.close()

    def test_engines_may_write_the_same_blocks_at_once(self) -> None:
        """Two engines write and read one storage, first in turn in one thread, then in two threads."""
        prompts = [self.prompt(30), self.prompt(26, seed=1)]
        engines = [self.engine(max_num_batched_tokens=5) for _ in range(2)]
        for engine in engines:
            for index, prompt in enumerate(prompts):
                engine.add(request(str(index), prompt))
        while any(engine.busy for engine in engines):
            for engine in engines:
                engine.step()
            self.fill(prompts[0][:13])
        for engine in engines:
            engine.check()
            engine.close()
        self._in_threads([self.prompt(30, seed=seed) for seed in range(10, 14)])

    def _in_threads(self, prompts: Sequence[Sequence[int]]) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self.fill(*prompts)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self.fill(*prompts)

    @pytest.mark.parametrize(("seed", "ranks"), [*((seed, 1) for seed in range(6)), *((seed, 2) for seed in range(6))])
    def test_random_lives(self, seed: int, ranks: int) -> None:
        """Random requests, aborts and failures, in engines that start and end on one storage."""
        draw = random.Random(seed)
        windows = draw.choice([(0,), (0, 6), (5,)])
        strides = [draw.choice((1, 2)) for _ in windows]
        layout = make_layout(
            num_blocks=draw.choice([30, 80]) * len(windows), windows=windows, strides=strides, ranks=ranks
        )
        self.live(draw, layout, late=seed % 3 if ranks > 1 else 0, ranks=ranks)

    def test_reset_drops_what_is_stored_or_says_no(self) -> None:
        self.fill(self.prompt())
        engine = self.engine()
        if engine.engine.call("reset_prefix_cache", {"reset_connector": True}):
            engine.run(request("after", self.prompt()))
            engine.check()
            assert engine.num_cached("after") == 0, "reset returned True, but blocks are still found"
        engine.close()

    def test_a_real_model_gives_the_same_logits(self, tmp_path: Path) -> None:
        write_tiny(tmp_path, "LlamaForCausalLM")
        settings = {**SMALL, "model": str(tmp_path), "kv_connector": self.name}
        answers = []
        for _ in range(2):
            with running(self.config(**settings), self.registry()) as engine:
                prompt = [token + 3 for token in self.prompt(60)]
                answers.append(drain(engine, [request("a", prompt, logprobs=3)])["a"])
        cold, again = answers
        assert tokens_of(again) == tokens_of(cold), "a reloaded prompt is continued otherwise"
        for one, other in zip(cold, again, strict=True):
            if one.logprobs is not None and other.logprobs is not None:
                np.testing.assert_allclose(other.logprobs.logprobs, one.logprobs.logprobs, atol=1e-4)
        if self.shares:
            assert again[0].num_cached, "nothing was found by a second engine"


def empty_plan(step: int) -> StepPlan:
    """A step without tokens."""
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step=step,
        removed_slots=nothing,
        added=[],
        appends=[],
        slots=nothing,
        num_scheduled=nothing,
        num_computed=nothing,
        samples=np.zeros(0, bool),
        num_drafts=nothing,
    )
