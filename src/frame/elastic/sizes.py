"""To how many engines a server can be scaled, and the configuration of so many."""

from __future__ import annotations

from typing import Any

from frame.core.config.data_parallel import MOST_LOCAL
from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.setups import mesh_of
from frame.expert_balance.settings import ExpertBalanceConfig
from frame.quoting import quoted


def is_elastic(config: FrameConfig) -> bool:
    """Whether the number of engines may change while they serve."""
    return _refusal_of_kind(config) is None


def refusal(config: FrameConfig, size: Any) -> str | None:
    """Why a server with the engines of `config` cannot be asked for `size` of them; None where it can."""
    if reason := _refusal_of_kind(config):
        return reason
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_LOCAL:
        return f"new_data_parallel_size must be a whole number from 1 to {MOST_LOCAL}, got {quoted(size)}"
    return None


def _refusal_of_kind(config: FrameConfig) -> str | None:
    executor, parallel = config.executor, config.data_parallel
    if not executor.enable_expert_parallel:
        return "the engines share no experts, so their number is fixed: start them with --enable-expert-parallel"
    if (
        parallel.data_parallel_rank is not None
        or parallel.data_parallel_external_lb
        or parallel.data_parallel_hybrid_lb
    ):
        return "this server has some of the engines behind a load balancer, so their number is fixed"
    if executor.nnodes > 1 or parallel.remote_ranks or parallel.headless:
        return "the engines of this server are on several machines, so their number is fixed"
    return None


def resized(config: FrameConfig, size: int) -> FrameConfig:
    """`config` with `size` engines; a single device has nothing to balance experts with, and no replicas of them."""
    parallel = {"data_parallel_size": size, "data_parallel_size_local": None, "data_parallel_start_rank": None}
    made = config.model_copy(update={"data_parallel": config.data_parallel.model_copy(update=parallel)})
    if len(mesh_of(made).ranks("expert", 0)) > 1:
        return made
    return made.model_copy(update={"expert_balance": ExpertBalanceConfig()})
