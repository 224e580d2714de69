"""frame's scheduler and step loop over fake workers, with a connector under test on both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.connector import ConnectorWorker
from frame.core.interfaces.engine import EngineOutput, EngineRequest
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.mesh import Placement
from frame.core.plugin_host.setups import mesh_of

from .checked_connector import CheckedConnector
from .checked_worker import CheckedWorker
from .engines import fake_engine, tokens_of
from .fake_cache import expected_tokens
from .fake_executor import FakeRanks, FakeWorkers
from .fake_worker import FakeWorker
from .setups import make_setup

if TYPE_CHECKING:
    from .connector_engines import ConnectorEngines

_STEPS = 3000
_PAUSE_SECONDS = 0.001


class ConnectedEngine:
    """frame's engine over fake workers, with the connector under test on both sides.

    The last of its `ranks` tells the ends of transfers `late` steps late.
    """

    def __init__(
        self,
        suite: ConnectorEngines,
        layout: KVLayout,
        broken_steps: Collection[int],
        *,
        ranks: int = 1,
        late: int = 0,
        **settings: Any,
    ) -> None:
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "tensor_parallel_size": ranks, **settings}
        config = suite.config(kv_connector=suite.name, **settings)
        self.layout = layout
        self.patience = suite.patience_seconds
        self.connector = CheckedConnector(suite.scheduler_side(config, layout))
        self.sides: list[CheckedWorker] = []

        def side(rank: int) -> Callable[[KVLayout], ConnectorWorker]:
            def make(layout: KVLayout) -> ConnectorWorker:
                inner = suite.worker_side(config, layout, rank) if rank else suite.worker_side(config, layout)
                self.sides.append(CheckedWorker(inner, self.connector.loads, late if rank == ranks - 1 else 0))
                return self.sides[-1]

            return make

        self.workers = FakeWorkers(lambda rank: FakeWorker(layout, side(rank), broken_steps, rank))
        mesh = mesh_of(config)
        placements = [Placement(rank=rank, local_rank=rank, mesh=mesh) for rank in range(ranks)]
        executor = FakeRanks(make_setup("executor", config=config, workers=self.workers, placements=placements))
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

    def run(self, *requests: EngineRequest, until: Callable[[], bool] | None = None) -> bool:
        """Adds requests and steps until nothing is left to do, transfers included; or, earlier, `until` it is so.

        Returns whether it was so. What takes more than many steps gets the suite's patience to end.
        """
        for one in requests:
            self.add(one)
        count, latest = 0, float("inf")
        while time.monotonic() < latest:
            if until is not None and until():
                return True
            if not self.busy:
                return False
            self.step()
            count += 1
            if count == _STEPS:
                latest = time.monotonic() + self.patience
            elif count > _STEPS:
                time.sleep(_PAUSE_SECONDS)
        held = self.held or "none"
        raise AssertionError(
            f"not at rest after {count} steps and {self.patience:g} seconds; held and never reported as sent: {held}"
        )

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished or transfers under way."""
        return self.engine.has_unfinished() or self.engine.scheduler.has_transfers()

    @property
    def held(self) -> list[str]:
        """Requests that ended and whose blocks the connector holds."""
        return list(self.engine.scheduler.lifecycle.held)

    @property
    def loading(self) -> list[str]:
        """Requests that wait for their blocks."""
        return list(self.engine.scheduler.lifecycle.loading)

    def ended(self, name: str) -> bool:
        """Whether a request has its last output."""
        return any(output.finish_reason is not None for output in self.outputs[name])

    def tokens(self, name: str) -> list[int]:
        """The output tokens of a request."""
        return tokens_of(self.outputs[name])

    def num_cached(self, name: str) -> int:
        """Prompt tokens of a request that were not computed."""
        return next((o.num_cached for o in self.outputs[name] if o.num_cached is not None), 0)

    def check(self, *names: str) -> None:
        """Every request (or those named) has the tokens of an undisturbed run, and every block is back."""
        faults = list(dict.fromkeys(self.connector.faults))
        faults += [f"rank {side.rank}: {fault}" for side in self.sides for fault in side.faults]
        assert not faults, "; ".join(faults)
        for name in names or self.requests:
            one = self.requests[name]
            want = expected_tokens(one.prompt_ids.tolist(), one.max_tokens, one.seed)
            assert self.tokens(name) == want, f"request {name} got other tokens than without a connector"
        usage = self.engine.stats().kv_usage
        assert usage == 0, f"{usage:.0%} of the KV cache is still in use although nothing runs"
        missing = set(self.requests) - set(self.connector.ended)
        assert not missing, f"frame's own fault: finished was not called for {sorted(missing)}"

    def close(self) -> None:
        """Closes both sides of the connector; may be called twice."""
        self.engine.close()
