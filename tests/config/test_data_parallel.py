"""Which engines a server starts, and settings of data parallelism that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from frame import LLM
from frame.core.config.data_parallel import DataParallelConfig
from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, range(1)),
        ({"data_parallel_size": 4}, range(4)),
        ({"data_parallel_size": 4, "data_parallel_rank": 2}, range(2, 3)),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 1,
                "data_parallel_hybrid_lb": True,
            },
            range(1, 3),
        ),
    ],
)
def test_the_engines_of_a_server(settings: dict[str, Any], ranks: range) -> None:
    parallel = FrameConfig.from_flat(**settings).data_parallel
    assert parallel.local_ranks == ranks
    for place, rank in enumerate(ranks):
        engine = parallel.engine(rank)
        assert engine.local_ranks == range(rank, rank + 1)
        assert engine.data_parallel_rank_local == place
        assert engine.data_parallel_size == parallel.data_parallel_size


def test_engines_of_other_servers_on_this_machine_have_devices_before_its_own() -> None:
    assert (
        DataParallelConfig(data_parallel_size=4, data_parallel_rank=3, data_parallel_rank_local=1)
        .engine(3)
        .data_parallel_rank_local
        == 1
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "data_parallel_size 2 has no rank 2: ranks are numbered"),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 3,
                "data_parallel_start_rank": 2,
                "data_parallel_hybrid_lb": True,
            },
            "data_parallel_size 4 has no rank 2 to 4",
        ),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, "2 of 4 engines would be started here; set"),
        ({"data_parallel_size": 4, "data_parallel_external_lb": True}, "external_lb needs data_parallel_rank"),
        ({"data_parallel_size": 4, "data_parallel_hybrid_lb": True}, "hybrid_lb needs data_parallel_size_local"),
        ({"data_parallel_size": 4, "data_parallel_rank_local": 1}, "rank_local needs data_parallel_rank"),
        (
            {"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_hybrid_lb": True},
            "data_parallel_hybrid_lb is for a server of several engines",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_size_local": 2},
            "data_parallel_size_local 2: data_parallel_rank starts one engine",
        ),
        ({"data_parallel_size": 5000}, "data_parallel_size"),
        ({"data_parallel_size": 65}, "a server starts at most 64 engines, and would start 65"),
    ],
)
def test_contradictions(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FrameConfig.from_flat(**settings)


def test_llm_has_one_engine() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size 2: LLM has one engine; use AsyncLLM or `frame serve`"):
        LLM(model="demo", data_parallel_size=2)
