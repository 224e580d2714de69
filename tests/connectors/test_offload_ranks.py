"""Real engines on one rank and on two that find each other's states and blocks in the offload tier."""

from __future__ import annotations

import pytest

from tests.connectors.state_models import complete, engine_of, prompts, write_model

TWO = {"tensor_parallel_size": 2, "executor": "threads"}
SIZES = (90, 33, 64, 9)
#: Families whose layers keep states, and the tokens of which a prefix with a copy is a multiple.
FAMILIES = {
    "mamba2": 16, "mamba": 16, "qwen3-next": 8, "lfm2": 8, "kimi-linear": 8, "minimax": 8, "falcon-h1": 8,
    "olmo-hybrid": 8, "llama": 8,
}  # fmt: skip
CASES = [name if name == "qwen3-next" else pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES]


def found(grain):
    return [(size - 1) // grain * grain for size in SIZES]


@pytest.mark.parametrize("family", CASES)
def test_shared_memory_is_read_from_one_rank_by_two_and_back(family, tmp_path):
    model, given = write_model(tmp_path / "model", family), [prompts(shift, SIZES) for shift in (0, 50)]
    with engine_of(model) as engine:
        want = [complete(engine, some, f"{number}-")[0] for number, some in enumerate(given)]
    (tmp_path / "shm").mkdir()
    options = {"size": 0.02, "shared": True, "shared_folder": str(tmp_path / "shm")}
    with engine_of(model, "offload", options) as one, engine_of(model, "offload", options, **TWO) as two:
        for number, (there, here) in enumerate([(one, two), (two, one)]):
            assert complete(there, given[number], f"first{number}")[0] == want[number]
            assert complete(here, given[number], f"again{number}") == (want[number], found(FAMILIES[family]))
            counters = here.stats().connector_counters
            assert counters["offload_shared_read_bytes"] > 0
            assert not {"offload_failed_blocks", "offload_shared_failed_blocks"} & set(counters)
