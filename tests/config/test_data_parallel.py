"""Which engines a server starts, and settings of data parallelism that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from frame import LLM
from frame.core.config.data_parallel import DataParallelConfig
from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.ranks.client import start_engine

#: A machine that starts engines for a server elsewhere.
OTHER: dict[str, Any] = {
    "data_parallel_size": 4,
    "data_parallel_size_local": 2,
    "data_parallel_start_rank": 2,
    "data_parallel_address": "a",
    "data_parallel_secret_file": "/s",
    "headless": True,
}


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


@given(st.data(), st.integers(1, 12))
def test_machines_start_every_engine_once_and_one_serves_all(data: st.DataObject, size: int) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, size), max_size=3)) | {size})
    shared = {"data_parallel_size": size, "data_parallel_address": "a", "data_parallel_secret_file": "/s"}
    started: list[int] = []
    for first, end in zip([0, *ends], ends, strict=False):
        own = {"data_parallel_start_rank": first, "data_parallel_size_local": end - first}
        headless = first > 0
        parallel = FrameConfig.from_flat(**shared, **own, headless=headless).data_parallel
        started += parallel.local_ranks
        assert list(parallel.served_ranks) == list(parallel.local_ranks if headless else range(size))
        assert parallel.remote_ranks == ([] if headless else list(range(end, size)))
        for rank in parallel.local_ranks:
            engine = parallel.engine(rank)
            assert engine.data_parallel_secret_file == ("/s" if headless else None)
            assert DataParallelConfig.model_validate_json(engine.model_dump_json()) == engine
    assert started == list(range(size))


def test_a_node_of_an_engine_may_be_called_headless_as_in_vllm() -> None:
    FrameConfig.from_flat(headless=True, nnodes=2, node_rank=1, tensor_parallel_size=2, master_addr="a")


def test_a_load_balancer_needs_no_address() -> None:
    settings = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}
    assert not FrameConfig.from_flat(**settings, data_parallel_address="a").data_parallel.over_machines


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
        ({"headless": True}, "headless is for a machine that starts some of the engines of a server elsewhere: set"),
        (
            {"data_parallel_size": 4, "headless": True, "data_parallel_size_local": 2},
            "headless needs data_parallel_start_rank, data_parallel_address",
        ),
        ({**OTHER, "data_parallel_secret_file": None}, "data_parallel_address a needs data_parallel_secret_file"),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_address": "a"},
            "data_parallel_address a needs data_parallel_secret_file",
        ),
        ({**OTHER, "data_parallel_start_rank": 3}, "data_parallel_size 4 has no rank 3 to 4"),
        ({**OTHER, "data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb for a server: give one of them"),
        ({**OTHER, "data_parallel_rank": 2}, "headless goes with data_parallel_start_rank"),
        (
            {**OTHER, "enable_expert_parallel": True, "data_parallel_rpc_port": 65535},
            "workers of engines that share experts meet at the port after data_parallel_rpc_port 65535",
        ),
        (
            {**OTHER, "nnodes": 2, "tensor_parallel_size": 2, "master_addr": "a"},
            "nnodes 2: each engine of data_parallel_address is on one machine",
        ),
        (
            {"data_parallel_size": 2, "nnodes": 2, "tensor_parallel_size": 2, "master_addr": "a"},
            "an engine on several machines is the only one of its server; give each one machine by "
            "data_parallel_address, or start a server for each with data_parallel_rank$",
        ),
        (
            {
                "data_parallel_size": 2,
                "enable_expert_parallel": True,
                "nnodes": 2,
                "tensor_parallel_size": 2,
                "master_addr": "a",
            },
            "nnodes 2 with data_parallel_size 2: .*; give each one machine by data_parallel_address$",
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


async def test_a_program_is_not_headless() -> None:
    with pytest.raises(ConfigError, match="headless is for `frame serve`"):
        await start_engine(FrameConfig.from_flat(**OTHER))
    with pytest.raises(ConfigError, match="LLM has one engine"):
        LLM(model="demo", **OTHER)
