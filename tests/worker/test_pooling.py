from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from frame.core.interfaces.pooling_params import PoolingFacts, PoolingParams
from frame.core.worker.pooling.pooling import Pooling


class Recorder:
    """A pooler that notes who comes and goes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def add(self, slot: int, token_ids: np.ndarray) -> None:
        del token_ids
        self.calls.append(("add", slot))

    def remove(self, slot: int) -> None:
        self.calls.append(("remove", slot))


def test_the_pooler_of_a_request_hears_that_it_left() -> None:
    poolers: dict[bool, Any] = {False: Recorder(), True: Recorder()}
    nothing: Any = None
    pooling = Pooling(PoolingFacts(tasks=["embed"], size=1), poolers, nothing, nothing)

    def add(slot: int, per_token: bool) -> None:
        request: Any = SimpleNamespace(
            slot=slot, request_id="r", pooling=PoolingParams(per_token=per_token), token_ids=np.array([1])
        )
        pooling.add(request)

    add(2, True)
    add(3, False)
    pooling.remove(2)
    pooling.remove(2)
    add(3, True)  # whoever was there is gone
    assert poolers[True].calls == [("add", 2), ("remove", 2), ("add", 3)]
    assert poolers[False].calls == [("add", 3), ("remove", 3)]
