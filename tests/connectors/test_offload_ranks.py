"""Real engines on one rank, on two and in two stages that find each other's states and blocks in the offload tier."""

from __future__ import annotations

import time
from functools import partial

import pytest

from frame.plugins.connectors.offload.worker import OffloadWorker
from tests.connectors.state_models import complete, engine_of, prompts, write_model

ONE = {}
TWO = {"tensor_parallel_size": 2, "executor": "threads"}
TWO_STAGES = {"pipeline_parallel_size": 2, "executor": "threads"}
SIZES = (90, 33, 64, 9)
#: Families whose layers keep states, and the tokens of which a prefix with a copy is a multiple.
FAMILIES = {
    "mamba2": 16, "mamba": 16, "qwen3-next": 8, "lfm2": 8, "kimi-linear": 8, "minimax": 8, "falcon-h1": 8,
    "olmo-hybrid": 8, "llama": 8,
}  # fmt: skip
STAGES = [
    pytest.param(family, sizes, marks=pytest.mark.matrix)
    for family in ("qwen3-next", "llama")
    for sizes in ((ONE, TWO_STAGES), (TWO, TWO_STAGES))
]
CASES = [
    pytest.param(family, (ONE, TWO), marks=[] if family == "qwen3-next" else [pytest.mark.matrix])
    for family in FAMILIES
] + STAGES


def found(grain):
    return [(size - 1) // grain * grain for size in SIZES]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_shared_memory_is_read_from_one_rank_by_two_and_back(family, sizes, tmp_path):
    model, given = write_model(tmp_path / "model", family), [prompts(shift, SIZES) for shift in (0, 50)]
    with engine_of(model) as engine:
        want = [complete(engine, some, f"{number}-")[0] for number, some in enumerate(given)]
    (tmp_path / "shm").mkdir()
    options = {"size": 0.02, "shared": True, "shared_folder": str(tmp_path / "shm")}
    made = [partial(engine_of, model, "offload", options, **size) for size in sizes]
    with made[0]() as one, made[1]() as two:
        for number, (there, here) in enumerate([(one, two), (two, one)]):
            assert complete(there, given[number], f"first{number}")[0] == want[number]
            assert complete(here, given[number], f"again{number}") == (want[number], found(FAMILIES[family]))
            counters = here.stats().connector_counters
            assert counters["offload_shared_read_bytes"] > 0
            assert not {"offload_failed_blocks", "offload_shared_failed_blocks"} & set(counters)


def press(engine, given, label):
    """Says the prompts one by one, and then so many others that all has gone to the disk; returns the tokens."""
    tokens, connector = [], engine.scheduler._transfers.connector
    for number, prompt in enumerate([*given, *prompts(200, (90, 91, 92, 93, 94, 17, 18, 19))]):
        tokens += complete(engine, [prompt], f"{label}{number}-")[0]
        latest = time.monotonic() + 60
        while connector.waits and time.monotonic() < latest:
            complete(engine, [[5, 6]], f"{label}{number}-{time.monotonic()}-")
            time.sleep(0.002)
    assert "offload_disk_lost_blocks" not in engine.stats().connector_counters
    return tokens[: len(given)]


def leave(model, options, given, want, monkeypatch, settings):
    """Has an engine whose host memory holds little leave the prompts on the disk."""
    make = OffloadWorker._make_slab

    def small(worker, device, form, size, kind):
        return make(worker, device, form, (8 if kind else 64) * form.row_bytes, kind)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadWorker, "_make_slab", small)
        with engine_of(model, "offload", options, **settings) as engine:
            assert press(engine, given, "first") == want


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_the_disk_is_read_from_one_rank_by_two_and_back(family, sizes, tmp_path, monkeypatch):
    model, given = write_model(tmp_path / "model", family), [prompts(shift, SIZES) for shift in (0, 50)]
    with engine_of(model) as engine:
        want = [complete(engine, some, f"{number}-")[0] for number, some in enumerate(given)]
    options = {"size": 0.02, "disk_folder": str(tmp_path / "disk"), "disk_size": 0.1}
    for number, (there, here) in enumerate([sizes, sizes[::-1]]):
        leave(model, options, given[number], want[number], monkeypatch, there)
        with engine_of(model, "offload", options, **here) as engine:
            assert complete(engine, given[number], "again") == (want[number], found(FAMILIES[family]))
            counters = engine.stats().connector_counters
            assert counters["offload_disk_read_bytes"] > 0
            assert not {"offload_failed_blocks", "offload_disk_failed_blocks"} & set(counters)
