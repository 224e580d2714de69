"""Exchanges the weights of a running engine in the order that keeps it safe. Workers check, read and write them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..interfaces.client import BrokenEngineError
from ..interfaces.executor import Executor
from .schedule.scheduler import Scheduler

logger = logging.getLogger("frame.engine")


def update_weights(executor: Executor, scheduler: Scheduler, source: Mapping[str, Any]) -> None:
    """Has every worker take the weights of `source` in place; no step may be in flight.

    Running requests are preempted and computed again with the new weights, and nothing of the prefix cache stays.
    Raises `RuntimeError` with the reason while the old weights serve on, `BrokenEngineError` when neither do.
    """
    try:
        executor.call("check_weights", dict(source))
    except Exception as error:
        raise RuntimeError(f"the old weights serve on: {_reason(error)}") from error
    scheduler.preempt_all()
    if not scheduler.reset_prefix_cache():
        raise RuntimeError("the old weights serve on: requests still load blocks")
    try:
        executor.call("update_weights", dict(source))
    except Exception as error:
        logger.exception("the new weights could not be read; taking the old ones again")
        try:
            executor.call("update_weights", {})
        except Exception as broken:
            text = f"neither the new nor the old weights can be read: {_reason(broken)}"
            raise BrokenEngineError(text) from broken
        raise RuntimeError(f"the old weights serve on: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
