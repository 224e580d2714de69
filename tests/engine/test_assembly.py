"""What is left of an engine that could not be started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import Offer
from frame.interfaces import CacheView, ConnectorScheduler, ConnectorWorker, Provider, RequestView, TransferReport
from frame.offline.in_process import make_engine
from frame.settings import Registry
from frame.testing.checkpoints import make_checkpoint

CLOSED: list[str] = []
FAULT: list[str] = []


class Half(ConnectorScheduler):
    """The scheduler side."""

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        if "connect" in FAULT:
            raise ValueError("the workers do not fit")

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        return 0, False

    def close(self) -> None:
        CLOSED.append("scheduler")


class HalfWorker(ConnectorWorker):
    """The worker side."""

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if "register" in FAULT:
            raise ValueError("the caches do not fit")

    def begin_step(self, message: bytes) -> None:
        pass

    def end_step(self, finished: object) -> TransferReport:
        return TransferReport()

    def handshake(self) -> bytes:
        if "handshake" in FAULT:
            raise ValueError("nobody is there")
        return b""

    def close(self) -> None:
        CLOSED.append("worker")


@pytest.mark.parametrize(
    ("fault", "closed"),
    [("register", ["worker"]), ("handshake", ["worker"]), ("connect", ["scheduler", "worker"])],
)
def test_a_start_that_fails_closes_its_connector(fault: str, closed: list[str], tmp_path: Path) -> None:
    CLOSED.clear()
    FAULT[:] = [fault]
    config = from_flat({"model": str(make_checkpoint(tmp_path, "llama")), "kv_connector": "half", "max_num_seqs": 2})
    registry = Registry.load()
    provider = Provider("half", f"{__name__}:Half", api=">=0.2.dev1,<0.3", tags={"worker": f"{__name__}:HalfWorker"})
    registry.offers.append(Offer("connector", provider, "strangers", "1.0"))
    with pytest.raises(ValueError, match=r"do not fit|nobody is there"):
        make_engine(config, registry)
    assert closed == CLOSED
