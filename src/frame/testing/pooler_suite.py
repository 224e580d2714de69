"""The contract of poolers: the rows of a prompt depend on no step, no other prompt and no earlier user of its slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.pooling import Pooler, PoolerRows

from .plugin_suite import PluginSuite

_SLOTS, _WIDTH = 6, 8
#: (slot, first position, tokens, whether the prompt ends) of each row of a step
Row = tuple[int, int, int, bool]


class PoolerSuite(PluginSuite):
    """The contract of `frame.interfaces.Pooler`.

        class TestMine(PoolerSuite):
            plugin = "mine"                            # or target = "package.module:Class"

    Pools prompts of random hidden states whole and in chunks, alone and beside others.
    """

    kind = "pooler"
    #: largest difference between a prompt pooled whole and in parts
    tolerance: ClassVar[float] = 1e-5
    #: tokens of every prompt; override where a pooler looks for certain ones
    token_ids: ClassVar[Sequence[int]] = (5, 7, 3, 7, 9, 7, 2, 4, 8)

    def pooler(self) -> Pooler:
        """A new pooler for a few slots."""
        made = self.make(num_slots=_SLOTS, hidden_size=_WIDTH)
        assert isinstance(made, Pooler), f"{type(made).__name__} does not derive from Pooler"
        return made

    def hidden(self, seed: int) -> Tensor:
        """The hidden states of a prompt, [tokens, width]."""
        return torch.randn(len(self.token_ids), _WIDTH, generator=torch.Generator().manual_seed(seed))

    def step(self, pooler: Pooler, rows: Sequence[Row], prompts: dict[int, Tensor]) -> list[Tensor]:
        """Runs one step of rows, `prompts` by slot; returns the pooled rows of each prompt that ended."""
        pieces = [prompts[slot][first : first + count] for slot, first, count, _ in rows]
        slots, positions, counts, last = (np.array(column) for column in zip(*rows, strict=True))
        states = torch.cat(pieces)
        given = PoolerRows(slots, np.cumsum(counts) - counts, counts, positions, last)
        found, lengths = pooler.pool(states, given)
        found = found.clone()
        states.fill_(float("nan"))  # the next step overwrites it
        assert len(lengths) == int(last.sum()), f"{int(last.sum())} prompts ended, pool gave {len(lengths)} counts"
        assert found.shape == (sum(lengths), _WIDTH), f"pool gave {list(found.shape)} for counts {lengths}"
        if not pooler.per_token:
            assert set(lengths) <= {1}, f"one row a prompt was promised, pool gave counts {lengths}"
        return list(found.split(lengths)) if lengths else []

    def add(self, pooler: Pooler, *slots: int) -> None:
        """Requests take these slots."""
        for slot in slots:
            pooler.add(slot, np.array(self.token_ids, np.int32))

    def whole(self, seed: int) -> Tensor:
        """The rows of a prompt that is pooled alone and in one step."""
        pooler = self.pooler()
        self.add(pooler, 0)
        (found,) = self.step(pooler, [(0, 0, len(self.token_ids), True)], {0: self.hidden(seed)})
        return found.float()

    def assert_same(self, found: Tensor, wanted: Tensor, how: str) -> None:
        """Raises unless the rows agree."""
        assert found.shape == wanted.shape, f"{how}: {list(found.shape)} rows instead of {list(wanted.shape)}"
        gap = float((found.float() - wanted).abs().max()) if wanted.numel() else 0.0
        assert gap < self.tolerance, f"{how} changes a row by {gap:.2g}"

    def test_rows_do_not_depend_on_the_batch(self) -> None:
        pooler, size = self.pooler(), len(self.token_ids)
        self.add(pooler, 4, 1, 3)
        prompts = {slot: self.hidden(slot) for slot in (4, 1, 3)}
        found = self.step(pooler, [(slot, 0, size, True) for slot in prompts], prompts)
        for slot, rows in zip(prompts, found, strict=True):
            self.assert_same(rows, self.whole(slot), "a batch")

    def test_chunks_give_the_rows_of_the_whole(self) -> None:
        pooler, size = self.pooler(), len(self.token_ids)
        self.add(pooler, 2, 5)
        prompts = {2: self.hidden(1), 5: self.hidden(2)}
        assert not self.step(pooler, [(2, 0, 3, False), (5, 0, 1, False)], prompts)
        (first,) = self.step(pooler, [(5, 1, size - 1, True), (2, 3, 2, False)], prompts)
        (second,) = self.step(pooler, [(2, 5, size - 5, True)], prompts)
        self.assert_same(first, self.whole(2), "a prompt in two steps")
        self.assert_same(second, self.whole(1), "a prompt in three steps")

    def test_a_slot_starts_anew(self) -> None:
        pooler, size = self.pooler(), len(self.token_ids)
        self.add(pooler, 2)
        self.step(pooler, [(2, 0, 4, False)], {2: self.hidden(1).fill_(float("nan"))})  # a request that must fail
        pooler.remove(2)
        self.add(pooler, 2)
        self.step(pooler, [(2, 0, 2, False)], {2: self.hidden(2)})
        (found,) = self.step(pooler, [(2, 2, size - 2, True)], {2: self.hidden(2)})
        self.assert_same(found, self.whole(2), "a slot that was used before")

    def test_a_cached_prefix_is_only_skipped_where_it_may_be(self) -> None:
        pooler, size = self.pooler(), len(self.token_ids)
        if pooler.needs_every_token:
            return
        self.add(pooler, 0)
        (found,) = self.step(pooler, [(0, size - 1, 1, True)], {0: self.hidden(3)})
        self.assert_same(found, self.whole(3), "a cached prefix")

    def test_rows_of_other_poolers_are_left_alone(self) -> None:
        pooler, size = self.pooler(), len(self.token_ids)
        self.add(pooler, 0)
        states = torch.cat((torch.full((3, _WIDTH), 300.0), self.hidden(1)))
        one = np.array([0])
        found, _ = pooler.pool(states, PoolerRows(one, one + 3, one + size, one, one == 0))
        self.assert_same(found, self.whole(1), "a row of another pooler")
