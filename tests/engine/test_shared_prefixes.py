"""Which rows of a step share a prefix: kept up as requests come and go, never worse than comparing all tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from frame.core.config.flat import from_flat
from frame.core.engine.cache.common_prefixes import SharedPrefixes
from frame.core.interfaces.attention import GroupBatch
from frame.core.interfaces.step import PrefixCosts
from frame.core.plugin_host.registry import Registry
from frame.plugins.attention.torch import TorchAttention
from frame.testing.engines import drain, prompts, request, running, tokens_of
from frame.testing.tiny import write_tiny

NONE = np.zeros(0, np.int32)


def rows_of(prefixes: SharedPrefixes, slots: list[int], computed: int = 1 << 20) -> list[tuple[list[int], int]]:
    """(slots, tokens) of the groups when every one of `slots` decodes a token."""
    order = np.array(slots, np.int32)
    ones = np.ones(len(slots), np.int32)
    found = prefixes.rows(order, ones, ones * computed)
    return [(sorted(order[group.rows].tolist()), group.num_tokens) for group in found]


def test_requests_with_the_same_first_blocks_are_a_group_of_the_tokens_that_all_share() -> None:
    prefixes = SharedPrefixes(8, PrefixCosts(launch=1), {0: 16})
    prefixes.enter(3, [[1, 2, 3, 4]])
    assert rows_of(prefixes, [3]) == []
    prefixes.enter(5, [[1, 2, 3, 9]])
    prefixes.enter(0, [[7, 8]])
    prefixes.enter(1, [[1, 2, 3, 8, 6]])
    assert rows_of(prefixes, [0, 3, 1, 5]) == [([1, 3, 5], 48)]
    assert rows_of(prefixes, [0, 3, 1]) == [([1, 3], 48)]
    prefixes.leave(3)  # the one that the others were compared with
    assert rows_of(prefixes, [0, 1, 5]) == [([1, 5], 48)]
    prefixes.leave(1)
    assert rows_of(prefixes, [0, 5]) == []


def test_one_with_a_short_prefix_does_not_spoil_that_of_many() -> None:
    prefixes = SharedPrefixes(8, PrefixCosts(launch=1), {0: 16})
    long = list(range(1, 101))
    for slot in range(6):
        prefixes.enter(slot, [[*long, 200 + slot]])
    prefixes.enter(6, [[1, 2, 300]])
    assert rows_of(prefixes, list(range(7))) == [([0, 1, 2, 3, 4, 5], 1600)]


def test_every_group_of_layers_must_agree() -> None:
    prefixes = SharedPrefixes(8, PrefixCosts(launch=1), {0: 16, 1: 16})
    prefixes.enter(0, [[1, 2, 3], [4, 5, 6]])
    prefixes.enter(1, [[1, 2, 3], [4, 7, 6]])
    assert rows_of(prefixes, [0, 1]) == [([0, 1], 16)]


def test_groups_of_unequal_blocks_share_whole_grains() -> None:
    prefixes = SharedPrefixes(8, PrefixCosts(launch=1), {0: 16, 1: 32}, grain=32)
    prefixes.enter(0, [[1, 2, 3, 10], [4, 5]])
    prefixes.enter(1, [[1, 2, 3, 11], [4, 6]])
    assert rows_of(prefixes, [0, 1]) == [([0, 1], 32)]
    prefixes.enter(2, [[1, 20], [7]])
    assert rows_of(prefixes, [0, 2]) == []


def test_rows_that_compute_more_or_lack_shared_tokens_are_left_out() -> None:
    prefixes = SharedPrefixes(8, PrefixCosts(launch=1), {0: 16})
    for slot in range(4):
        prefixes.enter(slot, [[1, 2]])
    slots = np.arange(4, dtype=np.int32)
    (group,) = prefixes.rows(slots, np.array([1, 5, 1, 1], np.int32), np.array([40, 40, 16, 32], np.int32))
    assert group.rows.tolist() == [0, 3]
    assert prefixes.rows(slots[:1], np.ones(1, np.int32), np.array([40], np.int32)) == []


def test_rows_that_would_save_too_little_are_no_group() -> None:
    prefixes = SharedPrefixes(40, PrefixCosts(launch=1000), {0: 16})
    for slot in range(17):
        prefixes.enter(slot, [list(range(1, 6))])
    # the 17th row would be a tile of its own and save nothing
    assert rows_of(prefixes, list(range(17))) == [(list(range(16)), 80)]
    prefixes.leave(16)
    prefixes.leave(15)
    assert rows_of(prefixes, list(range(15))) == [(list(range(15)), 80)]
    prefixes.leave(14)
    assert rows_of(prefixes, list(range(14))) == [(list(range(14)), 80)]
    prefixes.leave(0)
    assert rows_of(prefixes, list(range(1, 14))) == []


def test_costs_decide_by_rows_tokens_and_all_groups_together() -> None:
    costs = PrefixCosts(launch=1000, tile=2.0, few=0.5, some=1.0, many=1.0)
    prefixes = SharedPrefixes(40, costs, {0: 16})
    for slot in range(4):  # four rows save half of what they read, which is what their tile costs
        prefixes.enter(slot, [[*range(1, 41), 50 + slot]])
    assert rows_of(prefixes, list(range(4))) == []
    prefixes.enter(4, [[*range(1, 41), 60]])  # five save (5 - 2) · 640
    assert rows_of(prefixes, list(range(5))) == [(list(range(5)), 640)]
    prefixes.leave(4)
    for slot in range(5, 15):  # (5 - 2) · 160 are too few for a launch, twice of it are not
        prefixes.enter(slot, [[*range(100 * (slot % 2 + 1), 100 * (slot % 2 + 1) + 10), 500 + slot]])
    assert rows_of(prefixes, [0, 1, 2, 3, 5, 7, 9, 11, 13]) == []
    assert [tokens for _, tokens in rows_of(prefixes, [*range(4), *range(5, 15)])] == []
    prefixes.enter(15, [[*range(200, 210), 600]])
    prefixes.enter(16, [[*range(100, 110), 601]])
    assert sorted(tokens for _, tokens in rows_of(prefixes, [*range(4), *range(5, 17)])) == [160, 160]


def test_without_costs_no_group_is_reported() -> None:
    prefixes = SharedPrefixes(8, None, {0: 16})
    prefixes.enter(0, [[1]])
    prefixes.enter(1, [[1]])
    assert rows_of(prefixes, [0, 1]) == []
    prefixes.leave(0)


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.lists(st.integers(1, 2), min_size=1, max_size=5))),
)
def test_groups_share_their_tokens_whichever_requests_come_and_go(events: list[tuple[bool, int, list[int]]]) -> None:
    """All members of a group hold the same blocks for the group's tokens."""
    prefixes, tables = SharedPrefixes(8, PrefixCosts(launch=1), {0: 4}), {}
    for enters, slot, path in events:
        if enters and slot not in tables:
            table = [sum(3**i * step for i, step in enumerate(path[: depth + 1])) for depth in range(len(path))]
            tables[slot] = table
            prefixes.enter(slot, [table])
        elif not enters and slot in tables:
            del tables[slot]
            prefixes.leave(slot)
        for members, tokens in rows_of(prefixes, sorted(tables)):
            assert len(members) > 1
            assert len({tuple(tables[one][: tokens // 4]) for one in members}) == 1
            assert all(len(tables[one]) >= tokens // 4 for one in members)


def test_a_step_costs_microseconds() -> None:
    prefixes = SharedPrefixes(512, PrefixCosts(launch=1), {0: 16})
    for slot in range(256):
        prefixes.enter(slot, [[*range(1, 1001), 2000 + slot]])
    slots, ones = np.arange(256, dtype=np.int32), np.ones(256, np.int32)
    prefixes.rows(slots, ones, ones * 20000)
    start = time.process_time()
    for _ in range(200):
        prefixes.rows(slots, ones, ones * 20000)
    assert (time.process_time() - start) / 200 < 1e-3  # about 15 µs on an idle core


class Watched(TorchAttention):
    """Takes no use of prefixes, but checks them: shared tokens lie in the same blocks of every row of a tile."""

    shares_prefixes = True
    seen: list[tuple[int, int]]

    def plan(self, batch: GroupBatch) -> Any:
        prefix = batch.prefix
        if prefix is not None:
            size, lens = self.spec.block_size, batch.seq_lens
            for rows, tokens in zip(prefix.tile_rows.tolist(), prefix.tile_lens.tolist(), strict=True):
                members = [row for row in rows if row >= 0]
                assert bool(members) == bool(tokens)
                assert len({tuple(batch.block_table[row, : tokens // size].tolist()) for row in members}) <= 1
                assert all(prefix.row_lens[row] == tokens < lens[row] for row in members)
                assert all(batch.host_query_lens[row] == 1 for row in members)
                if members:
                    type(self).seen.append((len(members), tokens))
        return super().plan(batch)


@pytest.mark.parametrize("config", [{}, {"async_scheduling": False}, {"num_gpu_blocks_override": 30}], ids=str)
def test_an_engine_tells_attention_which_rows_share(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, with requests that come and go, and with too few blocks for all."""
    write_tiny(tmp_path, "Qwen3ForCausalLM")
    monkeypatch.setattr(Watched, "seen", [], raising=False)
    monkeypatch.setattr("frame.plugins.attention.torch.TorchAttention", Watched)
    prompt, other = prompts(512, (100, 20))
    asked = [request(str(index), [*prompt, index + 5], 4 + 3 * index) for index in range(6)]
    asked += [request("half", [*prompt[:40], 7, 8], 9), request("other", other, 9)]
    base = {"model": str(tmp_path), "dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 100}
    found = []
    for tokens in (1, 0):
        Watched.seen.clear()
        given = {**base, "max_num_batched_tokens": 48, "shared_prefix_min_tokens": tokens, **config}
        with running(from_flat(given), Registry.load()) as engine:
            outputs = drain(engine, asked)
        found.append(({name: tokens_of(one) for name, one in outputs.items()}, list(Watched.seen)))
    (first, seen), (second, unseen) = found
    assert first == second
    assert not unseen
    assert {tokens for _, tokens in seen} <= {32, 96}
    assert max(count for count, _ in seen) >= 4


@pytest.mark.parametrize(("tile_rows", "shared"), [(2, False), (8, True)])
def test_a_group_counts_by_the_rows_that_read_together(tile_rows: int, shared: bool) -> None:
    """Four rows in tiles of two save half of what they read, in one tile three quarters."""
    prefixes = SharedPrefixes(8, PrefixCosts(launch=40, rows=tile_rows), {0: 16})
    for slot in range(4):
        prefixes.enter(slot, [[1, 10 + slot]])
    ones = np.ones(4, np.int32)
    found = prefixes.rows(np.arange(4, dtype=np.int32), ones, 20 * ones)
    assert bool(found) is shared
