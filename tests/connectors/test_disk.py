"""The two halves of the disk connector, driven by hand: what is saved, what is loaded, and what must never be."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.connector import RequestView
from frame.core.interfaces.kv import CrossKV, FullKV, KVGroup, KVLayout, SlidingKV
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import BlockAppend, NewRequest, StepPlan, TransferReport
from frame.interfaces import BlockFormat, CacheView, Mesh, Placement
from frame.plugins.connectors.blocks.messages import blocks_name
from frame.plugins.connectors.disk.messages import DiskOptions
from frame.plugins.connectors.disk.scheduler import DiskScheduler
from frame.plugins.connectors.disk.worker import DiskWorker
from frame.testing import make_setup

BLOCK = 4
FULL = FullKV(num_kv_heads=1, head_dim=2, dtype="float32")
SLIDING = SlidingKV(num_kv_heads=1, head_dim=2, dtype="float32", window=5)
GROUPS = (
    KVGroup(specs=(FULL, FULL), layers=("a", "b"), block_size=BLOCK),
    KVGroup(specs=(SLIDING,), layers=("c",), block_size=BLOCK),
)
FORMAT = BlockFormat((2, BLOCK, 1, 2), (0, 1, 2, 3), torch.float32, 1)
LAYOUT = KVLayout(groups=GROUPS, pools=(40,), block_size=BLOCK, grain=BLOCK, model="test")


def key(index: int) -> bytes:
    return bytes([index + 1]) * 32


class Engine:
    """Both halves and a KV memory; `fill` stands for a forward pass."""

    def __init__(self, folder, layout=LAYOUT, max_bytes=None, **settings):
        config = FrameConfig.from_flat(kv_connector="disk", **settings)
        options = DiskOptions(folder=folder, max_bytes=max_bytes)
        self.scheduler = DiskScheduler(make_setup("connector", config=config, layout=layout), options)
        self.worker = DiskWorker(make_setup("connector", part="worker", config=config, layout=layout), options)
        pool = [torch.zeros(40, 64, dtype=torch.uint8) for _ in range(2)]
        self.caches = {"a": pool[0], "b": pool[1], "c": pool[0]}
        self.views = {name: CacheView(cache, FORMAT, name == "c") for name, cache in self.caches.items()}
        self.worker.register(self.views)
        self.scheduler.connect({rank: self.worker.handshake() for rank in range(self.scheduler.setup.mesh.size)})
        self.num_steps = 0
        self.reports = []

    def fill(self, blocks, seed):
        """Content of block `index` of a prompt; the same wherever it lies."""
        for slot, layer in ((0, "a"), (0, "b"), (1, "c")):
            block = blocks[slot]
            if block:
                draw = torch.Generator().manual_seed(seed * 10 + ord(layer))
                self.caches[layer][block] = torch.randn(16, generator=draw).view(torch.uint8)

    def content(self, blocks):
        return [self.caches[layer][blocks[slot]].clone() for slot, layer in ((0, "a"), (0, "b"), (1, "c"))]

    def plan(self, *, added=(), appends=(), rows=(), removed=(), finished=()):
        """rows: (slot, computed, scheduled)"""
        self.num_steps += 1
        columns = np.array(list(zip(*rows, strict=True)) or [[], [], []], np.int32)
        return StepPlan(
            step=self.num_steps,
            removed_slots=np.array(removed, np.int32),
            added=list(added),
            appends=list(appends),
            slots=columns[0],
            num_computed=columns[1],
            num_scheduled=columns[2],
            samples=np.ones(len(rows), bool),
            num_drafts=np.zeros(len(rows), np.int32),
            finished_ids=list(finished),
        )

    def run(self, plan, fill=(), fails=False) -> TransferReport | None:
        message = self.scheduler.build_message(plan)
        self.worker.begin_step(message)
        for blocks, seed in fill:
            self.fill(blocks, seed)
        if fails:
            return None
        report = self.worker.end_step(plan.finished_ids)
        report = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=TransferReport)
        self.scheduler.update(report)
        self.reports.append(report)
        return msgspec.structs.replace(report, counters=in_blocks(report.counters))


def in_blocks(counters):
    """Those counters that count blocks."""
    return {name: value for name, value in counters.items() if name.endswith(("_blocks", "_states"))}


def view(name="r", num_tokens=18, num_hashes=None):
    full = num_tokens // BLOCK if num_hashes is None else num_hashes
    return RequestView(
        request_id=name,
        token_ids=list(range(num_tokens)),
        block_hashes=[key(i) for i in range(full)],
        prompt_len=num_tokens,
    )


def new(name="r", slot=0, num_computed=0, blocks=((1, 2, 3, 4, 5), (6, 7, 8, 9, 10))):
    return NewRequest(
        slot=slot,
        request_id=name,
        token_ids=np.zeros(18, np.int32),
        prompt_len=18,
        num_computed=num_computed,
        block_ids=[np.array(table, np.int32) for table in blocks],
        params=SamplingParams(),
        seed=0,
    )


def save_prompt(engine, name="r"):
    assert engine.scheduler.matched_tokens(view(name), 0) == (0, False)
    fill = [((1 + i, 6 + i), i) for i in range(4)]
    return engine.run(engine.plan(added=[new(name)], rows=[(0, 0, 18)]), fill)


def load_prompt(engine, name="s", num_blocks=4, tables=((11, 12, 13, 14), (0, 0, 18, 19))):
    count, later = engine.scheduler.matched_tokens(view(name), 0)
    assert (count, later) == (num_blocks * BLOCK, False)
    engine.scheduler.allocated(view(name), [table[:num_blocks] for table in tables], count)
    added = new(name, num_computed=count, blocks=[[*table, 20 + g] for g, table in enumerate(tables)])
    return engine.run(engine.plan(added=[added], rows=[(0, count, 18 - count)]))


def test_saved_blocks_are_loaded_by_another_engine(tmp_path):
    first, second = Engine(tmp_path), Engine(tmp_path)
    assert save_prompt(first).counters == {"disk_saved_blocks": 4}
    report = load_prompt(second)
    assert report.failed_blocks == []
    assert report.counters == {"disk_loaded_blocks": 4}
    for index in (2, 3):
        assert all(map(torch.equal, first.content((1 + index, 6 + index)), second.content((11 + index, 16 + index))))
    # what the window does not need is not loaded: block 0 is nobody's
    assert not second.caches["c"][0].any()


def test_matches_are_whole_blocks_short_of_the_last_token_and_free_of_side_effects(tmp_path):
    engine = Engine(tmp_path)
    save_prompt(engine)
    for _ in range(3):
        assert engine.scheduler.matched_tokens(view(num_tokens=18), 0) == (16, False)
        assert engine.scheduler.matched_tokens(view(num_tokens=16), 0) == (12, False)
        assert engine.scheduler.matched_tokens(view(num_tokens=18), 8) == (8, False)
        assert engine.scheduler.matched_tokens(view(num_tokens=18), 16) == (0, False)
        assert engine.scheduler.matched_tokens(view(num_tokens=3), 0) == (0, False)
    other = RequestView(request_id="o", token_ids=range(18), block_hashes=[key(0), key(9), key(2)], prompt_len=18)
    assert engine.scheduler.matched_tokens(other, 0) == (4, False)
    assert engine.scheduler.matched_tokens(other, 4) == (0, False)


def test_chunks_save_each_block_when_it_is_full(tmp_path):
    engine = Engine(tmp_path)
    engine.scheduler.matched_tokens(view(), 0)
    saved = []
    first = new(blocks=((1, 2), (6, 7)))
    saved.append(engine.run(engine.plan(added=[first], rows=[(0, 0, 6)]), [((1, 6), 0)]))
    appends = [
        BlockAppend(
            group=group,
            slots=np.array([0, 0], np.int32),
            offsets=np.array([2, 3], np.int32),
            block_ids=np.array([block, block + 1], np.int32),
        )
        for group, block in ((0, 3), (1, 8))
    ]
    saved.append(engine.run(engine.plan(appends=appends, rows=[(0, 6, 9)]), [((2, 7), 1), ((3, 8), 2)]))
    saved.append(engine.run(engine.plan(rows=[(0, 15, 3)]), [((4, 9), 3)]))
    saved.append(engine.run(engine.plan(rows=[(0, 18, 1)])))
    assert [report.counters.get("disk_saved_blocks", 0) for report in saved] == [1, 2, 1, 0]
    assert load_prompt(Engine(tmp_path)).failed_blocks == []


def test_a_block_is_written_once(tmp_path):
    first, second = Engine(tmp_path), Engine(tmp_path)
    second.scheduler.matched_tokens(view("r"), 0)
    save_prompt(first)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*.kv")}
    assert second.run(second.plan(added=[new()], rows=[(0, 0, 18)])).counters == {}
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*.kv")} == before


def test_a_broken_step_publishes_nothing_nor_does_what_builds_on_it(tmp_path):
    engine = Engine(tmp_path)
    engine.scheduler.matched_tokens(view(), 0)
    engine.run(engine.plan(added=[new()], rows=[(0, 0, 8)]), fails=True)
    # planned before the scheduler heard of it: the same request goes on, another takes over its blocks
    assert engine.run(engine.plan(rows=[(0, 8, 10)])).counters == {}
    engine.scheduler.matched_tokens(view("other"), 0)
    assert list(tmp_path.rglob("*.kv")) == []
    # from here on the scheduler knows; what enters now is sound
    assert engine.run(engine.plan(removed=[0], finished=["r"])).notes == []
    assert engine.run(engine.plan(added=[new("other")], rows=[(0, 0, 18)])).counters == {"disk_saved_blocks": 4}


def test_what_entered_before_the_break_was_known_is_not_saved(tmp_path):
    engine = Engine(tmp_path)
    for name in ("r", "late"):
        engine.scheduler.matched_tokens(view(name), 0)
    broken, late = engine.plan(added=[new()], rows=[(0, 0, 8)]), engine.plan(added=[new("late", 1)], rows=[(1, 0, 18)])
    messages = [engine.scheduler.build_message(plan) for plan in (broken, late)]
    engine.worker.begin_step(messages[0])
    engine.worker.begin_step(messages[1])
    report = engine.worker.end_step([])
    assert report.counters == {}
    assert len(report.notes) == 1
    assert list(tmp_path.rglob("*.kv")) == []


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_promised_block_that_does_not_come_is_reported_and_nothing_built_on_it_is_saved(tmp_path, damage):
    first, second = Engine(tmp_path), Engine(tmp_path)
    save_prompt(first)
    for index in (3, 2):  # the last is not there, so that there is something left to save
        path = next(tmp_path.rglob(f"{key(index).hex()}.kv"))
        if index == 3 or damage == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])
        if index == 3:
            count, _ = second.scheduler.matched_tokens(view("s"), 0)
            assert count == 12
    second.scheduler.allocated(view("s"), [(11, 12, 13), (0, 17, 18)], 12)
    added = new("s", num_computed=12, blocks=((11, 12, 13, 14, 20), (0, 17, 18, 19, 21)))
    report = second.run(second.plan(added=[added], rows=[(0, 12, 6)]))
    assert report.failed_blocks == [(0, 13), (1, 18)]
    assert report.counters == {"disk_loaded_blocks": 2, "disk_failed_blocks": 1}
    assert {path.stem for path in tmp_path.rglob("*.kv")} == {key(0).hex(), key(1).hex()}
    # admitted again, computed this time: now all of it is sound
    assert second.scheduler.matched_tokens(view("s"), 0) == (8, False)
    report = second.run(second.plan(removed=[0], added=[new("s", 1)], rows=[(1, 0, 18)]))
    assert report.counters == {"disk_saved_blocks": 2}


def test_values_that_are_not_finite_are_not_kept(tmp_path):
    engine = Engine(tmp_path)
    engine.scheduler.matched_tokens(view(), 0)
    plan = engine.plan(added=[new()], rows=[(0, 0, 18)])
    engine.worker.begin_step(engine.scheduler.build_message(plan))
    engine.caches["b"][2].view(torch.float32)[3] = float("nan")
    assert in_blocks(engine.worker.end_step([]).counters) == {"disk_saved_blocks": 3, "disk_unsaved_blocks": 1}
    assert engine.scheduler.matched_tokens(view(), 0) == (4, False)


def test_bytes_seconds_and_hits_are_counted(tmp_path, caplog):
    caplog.set_level("INFO", "frame")
    first = Engine(tmp_path, max_bytes=1 << 20)
    assert f"disk connector: blocks of 4 tokens in {tmp_path}, at most 0.000977 GiB" in caplog.text
    save_prompt(first)
    engine = Engine(tmp_path)
    assert f"blocks of 4 tokens in {tmp_path}, as many as there is room for" in caplog.text
    load_prompt(engine)
    size = first.worker.tokens.num_bytes
    (saved,), (loaded,) = first.reports, engine.reports
    assert saved.counters["disk_save_bytes"] == loaded.counters["disk_load_bytes"] == 4 * size
    assert saved.counters["disk_save_seconds"] > 0
    assert loaded.counters["disk_load_seconds"] > 0
    assert "disk_lookup_tokens" not in saved.counters
    assert (loaded.counters["disk_lookup_tokens"], loaded.counters["disk_hit_tokens"]) == (16, 16)
    assert saved.gauges["disk_used_bytes"] >= 4 * size
    assert saved.gauges["disk_size_bytes"] == 1 << 20
    assert loaded.gauges == {}
    empty = engine.run(engine.plan())
    assert empty.counters == {}


def test_roles(tmp_path):
    consumer = Engine(tmp_path, kv_role="consumer")
    assert save_prompt(consumer).counters == {}
    producer = Engine(tmp_path, kv_role="producer")
    assert save_prompt(producer).counters == {"disk_saved_blocks": 4}
    assert producer.scheduler.matched_tokens(view(), 0) == (0, False)
    assert consumer.scheduler.matched_tokens(view(), 0) == (16, False)


def test_every_rank_must_have_the_block(tmp_path):
    engine = Engine(tmp_path, tensor_parallel_size=2)
    engine.scheduler.matched_tokens(view(), 0)
    save_prompt(engine)
    assert engine.scheduler.matched_tokens(view(), 0) == (0, False)
    setup = replace(engine.worker.setup, placement=Placement(rank=1, mesh=engine.worker.setup.mesh))
    second = DiskWorker(setup, engine.worker.options)
    second.register(engine.views)
    plan = engine.plan(added=[new()], rows=[(0, 0, 18)])
    second.begin_step(engine.scheduler.build_message(plan))
    told = second.end_step([]).counters
    assert told["disk_save_bytes"] == 4 * second.tokens.num_bytes
    assert "disk_save_seconds" not in told, "both write at the same time"
    assert engine.scheduler.matched_tokens(view(), 0) == (16, True)


def test_engines_that_share_experts_share_blocks(tmp_path):
    """The worker of the second has rank 1 of all, and is the first of its engine."""
    first, second = (Engine(tmp_path, data_parallel_size=2, enable_expert_parallel=True) for _ in range(2))
    setup = second.worker.setup
    second.worker = DiskWorker(replace(setup, placement=Placement(rank=1, mesh=setup.mesh)), second.worker.options)
    second.worker.register(second.views)
    second.scheduler.connect({0: second.worker.handshake()})
    first.scheduler.connect({0: first.worker.handshake()})
    save_prompt(second)
    assert load_prompt(first).failed_blocks == []


def test_other_models_and_other_layouts_share_nothing(tmp_path):
    save_prompt(Engine(tmp_path))
    for other in (
        msgspec.structs.replace(LAYOUT, model="other weights"),
        msgspec.structs.replace(LAYOUT, groups=GROUPS[:1]),
    ):
        assert blocks_name(other, Mesh()) != blocks_name(LAYOUT, Mesh())
        scheduler = DiskScheduler(make_setup("connector", layout=other), DiskOptions(folder=tmp_path))
        assert scheduler.matched_tokens(view(), 0) == (0, False)
    more = msgspec.structs.replace(LAYOUT, pools=(99,))
    assert blocks_name(more, Mesh()) == blocks_name(LAYOUT, Mesh())


def test_reset_forgets_the_blocks_of_these_weights(tmp_path):
    engine = Engine(tmp_path)
    save_prompt(engine)
    assert engine.scheduler.reset()
    assert engine.scheduler.matched_tokens(view(), 0) == (0, False)
    assert list(tmp_path.rglob("*.kv")) == []


def test_an_encoder_s_tokens_are_refused(tmp_path):
    group = KVGroup(specs=(CrossKV(num_kv_heads=1, head_dim=4, dtype="float32"),), layers=("cross",), block_size=4)
    layout = msgspec.structs.replace(LAYOUT, groups=(*GROUPS, group))
    with pytest.raises(ValueError, match="the disk connector cannot keep an encoder's tokens of layer cross"):
        DiskScheduler(make_setup("connector", layout=layout), DiskOptions(folder=tmp_path))


def test_nothing_is_kept_for_requests_that_ended(tmp_path):
    engine = Engine(tmp_path)
    save_prompt(engine)
    assert engine.scheduler.finished(view(), [[1], [6]]) == (False, None)
    engine.run(engine.plan(removed=[0], finished=["r"]))
    assert not engine.scheduler._hashes
    assert not engine.scheduler._prompts
    assert not engine.worker._sound


def test_a_worker_on_another_folder_of_that_name_ends_the_start(tmp_path):
    engine, other = Engine(tmp_path / "one"), Engine(tmp_path / "other")
    engine.scheduler.connect({0: engine.worker.handshake()})
    assert not list(tmp_path.rglob("mark-*"))
    with pytest.raises(ValueError, match="another one where the worker of rank 1 runs"):
        engine.scheduler.connect({0: engine.worker.handshake(), 1: other.worker.handshake()})
    assert not list((tmp_path / "one").rglob("mark-*"))
