"""frame's scheduler and step loop over a fake worker, with a connector under test on both sides."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.engine import EngineOutput, EngineRequest
from frame.core.interfaces.kv import KVLayout

from .checked_connector import CheckedConnector
from .engines import fake_engine, tokens_of
from .fake_cache import expected_tokens
from .fake_executor import FakeExecutor, FakeWorkers
from .fake_worker import FakeWorker
from .setups import make_setup

if TYPE_CHECKING:
    from .connector_suite import ConnectorSuite

_STEPS = 3000


class ConnectedEngine:
    """frame's engine over a fake worker, with the connector under test on both sides."""

    def __init__(self, suite: ConnectorSuite, layout: KVLayout, broken_steps: Collection[int], **settings: Any) -> None:
        config = suite.config(kv_connector=suite.name, **{"max_num_seqs": 4, "max_num_batched_tokens": 64, **settings})
        self.layout = layout
        self.connector = CheckedConnector(suite.scheduler_side(config, layout))
        self.workers = FakeWorkers(
            lambda rank: FakeWorker(layout, lambda layout: suite.worker_side(config, layout), broken_steps, rank)
        )
        executor = FakeExecutor(make_setup("executor", config=config, workers=self.workers))
        policy = suite.registry().make(
            "scheduler", config.scheduler.scheduling_policy, make_setup("scheduler", config=config), config
        )
        self.engine = fake_engine(config, executor, policy, layout, self.connector)
        self.connector.connect({worker.rank: worker.transfer.handshake() for worker in self.workers.made})
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.requests: dict[str, EngineRequest] = {}

    def add(self, one: EngineRequest) -> None:
        """Queues a request."""
        self.requests[one.request_id] = one
        self.outputs[one.request_id] = []
        self.engine.add(one)

    def step(self) -> None:
        """One step of the engine."""
        for output in self.engine.step():
            self.outputs[output.request_id].append(output)

    def run(self, *requests: EngineRequest) -> None:
        """Adds requests and steps until nothing is left to do, transfers included."""
        for one in requests:
            self.add(one)
        for _ in range(_STEPS):
            if not self.busy:
                return
            self.step()
        held = [name for name, hold in self.connector.ended.items() if hold and name not in self.connector.sent]
        raise AssertionError(f"not at rest after {_STEPS} steps; held and never reported as sent: {held or 'none'}")

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished or transfers under way."""
        return self.engine.has_unfinished() or self.engine.scheduler.has_transfers()

    def tokens(self, name: str) -> list[int]:
        """The output tokens of a request."""
        return tokens_of(self.outputs[name])

    def num_cached(self, name: str) -> int:
        """Prompt tokens of a request that were not computed."""
        return next((o.num_cached for o in self.outputs[name] if o.num_cached is not None), 0)

    def check(self, *names: str) -> None:
        """Every request (or those named) has the tokens of an undisturbed run, and every block is back."""
        for name in names or self.requests:
            one = self.requests[name]
            want = expected_tokens(one.prompt_ids.tolist(), one.max_tokens, one.seed)
            assert self.tokens(name) == want, f"request {name} got other tokens than without a connector"
        usage = self.engine.stats().kv_usage
        assert usage == 0, f"{usage:.0%} of the KV cache is still in use although nothing runs"
        missing = set(self.requests) - set(self.connector.ended)
        assert not missing, f"frame's own fault: finished was not called for {sorted(missing)}"

    def close(self) -> None:
        """Closes both sides of the connector."""
        self.engine.close()
