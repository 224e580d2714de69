"""Balances the experts of one worker's model: measures loads, has a policy place them, and moves weights between steps.

Every rank of the expert group calls `advance` at the end of each step, dummies included, and so all of them count the
same steps, begin in the same step, and change to a layer's new places in the same step. At most one round of copies
enters a step. The group must be used for nothing else. Knows no model and no way of routing.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.balancer import ExpertBalancer, ExpertPlacement, SlotShape, balancedness
from frame.core.interfaces.collectives import ProcessGroup
from frame.core.interfaces.load_trace import LoadRecord, LoadTraceWriter
from frame.core.interfaces.platform import HostCopy, SideQueue, Streams
from frame.core.interfaces.step import ExpertReport
from frame.core.layers.expert_map import ExpertMaps

from .moves import LayerMoves, Transfer, plan_moves
from .null import NoBalance

logger = logging.getLogger(__name__)

#: Parts of the window of loads: the oldest part is dropped as a whole, so that memory does not grow with the window.
_PARTS = 16
#: Steps between two questions whether the policy has answered.
_POLL_STEPS = 4
#: Most seconds that a policy at work keeps a worker that closes.
_CLOSE_SECONDS = 5.0
#: What rank 0 answers where the policy failed; else the balancedness, and the placement if something is to move.
_FAILED = b"-"
_SHARE = struct.Struct("<d")


class LoadWindow:
    """Tokens of each expert over the last steps, int64 [parts, L, E] on the device.

    It holds between 15/16 of `num_steps` steps and all of them; dummy steps do not count.
    """

    def __init__(self, maps: ExpertMaps, num_steps: int) -> None:
        self._maps = maps
        parts = min(num_steps, _PARTS)
        shape = (parts, maps.num_layers, maps.num_experts)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=maps.loads.device)
        self._steps = [0] * parts
        self._part, self._per_part = 0, -(-num_steps // parts)

    @property
    def num_steps(self) -> int:
        """Steps that are counted in `total`."""
        return sum(self._steps)

    def close_step(self, dummy: bool) -> None:
        """Takes the loads of the step that has ended."""
        if dummy:
            self._maps.take_loads(None)
            return
        if self._steps[self._part] == self._per_part:
            self._part = (self._part + 1) % len(self._steps)
            self._steps[self._part] = 0
            self._tokens[self._part].zero_()
        self._steps[self._part] += 1
        self._maps.take_loads(self._tokens[self._part])

    def total(self) -> Tensor:
        """Tokens of the window, int64 [L, E]."""
        return self._tokens.sum(0)


class _Placing(threading.Thread):
    """The policy at work in rank 0, beside the steps; `answer` is there once the thread has ended."""

    def __init__(self, balance: ExpertBalance, loads: HostCopy, num_steps: int, step: int) -> None:
        super().__init__(name="expert-balancer", daemon=True)
        self._balance, self._loads, self._num_steps, self._step = balance, loads, num_steps, step
        self.answer = _FAILED

    def run(self) -> None:
        try:
            loads = self._loads.wait()["loads"]
            self.answer = self._balance.place(LoadRecord(loads, self._num_steps, self._step))
        except Exception:
            logger.exception("the expert balancer failed; experts stay where they are")


class ExpertBalance(NoBalance):
    """Balances the layers of `maps`, whose weights are `rows`: tensors [local slots, …] of each layer, alike in all.

    `group` are the ranks that share the experts, with a communicator of its own. Loads of the last `window` steps
    count; a placement begins every `interval` steps, or once the last one is in place. In a step a rank sends and
    receives at most `rows_per_step` experts; `at_once` all of it happens at the end of one step. A rank whose tokens
    another one `counts`, too, does not. `record` is given the loads of every interval by rank 0. Takes memory for
    the experts of one layer, and in a round for twice `rows_per_step` experts. Raises `ValueError` for weights
    that cannot be moved.
    """

    def __init__(
        self,
        maps: ExpertMaps,
        rows: Sequence[Sequence[Tensor]],
        group: ProcessGroup,
        shape: SlotShape,
        balancer: ExpertBalancer,
        streams: Streams,
        *,
        window: int = 1000,
        interval: int = 3000,
        rows_per_step: int = 1,
        at_once: bool = False,
        counts: bool = True,
        logs: bool = False,
        queue: SideQueue | None = None,
        record: LoadTraceWriter | None = None,
    ) -> None:
        if min(window, interval, rows_per_step) < 1:
            raise ValueError(
                f"window {window}, interval {interval} and rows_per_step {rows_per_step} must be at least 1"
            )
        if problems := shape.problems(maps.num_experts):
            raise ValueError("; ".join(problems))
        self._maps, self._group, self._shape, self._streams = maps, group, shape, streams
        self._balancer, self._record = balancer, record
        self._at_once, self._counts, self._logs = at_once, counts, logs
        self._interval, self._rows_per_step, self._queue = interval, rows_per_step, queue or SideQueue()
        self._bytes = [_as_bytes(layer, tensors, shape.slots_per_rank) for layer, tensors in enumerate(rows)]
        widths = [[one.shape for one in layer] for layer in self._bytes]
        if len(rows) != maps.num_layers or any(width != widths[0] for width in widths):
            raise ValueError(f"experts of {len(rows)} layers with weights of {widths} bytes cannot share a buffer")
        self._buffer = [torch.empty_like(one) for one in self._bytes[0]]
        self._window = LoadWindow(maps, window)
        self._step, self._since = 0, 0
        self._placing: _Placing | bool = False  # on other ranks than 0 whether rank 0 is at it
        self._moving: Iterator[None] | None = None
        #: of the loads and the placement before the last decision; 1.0 before the first
        self.balancedness = 1.0
        #: decisions that changed something, experts that went from rank to rank, and those that came to this one
        self.num_placements, self.num_copies, self.num_received = 0, 0, 0
        self._told = ExpertReport()
        self._connect()

    def _connect(self) -> None:
        """Sends every rank a byte: the first messages of a communicator take longer than steps, which would wait."""
        self._group.all_reduce(self._window.total())
        ones = [1] * self._group.size
        message = self._bytes[0][0].new_zeros(self._group.size, 1)

        def send() -> None:
            self._group.all_to_all(message, ones, ones)

        self._queue.run(send)
        self._queue.join()
        self._group.host.gather(b"")

    def advance(self, dummy: bool) -> ExpertReport | None:
        self._window.close_step(dummy or not self._counts)
        self._step += 1
        self._since += 1
        if self._moving is not None:
            self._move()
        elif self._placing:
            if self._step % _POLL_STEPS == 0:
                self._poll()
        elif self._since >= self._interval:
            self._since = 0
            self._begin()
            if self._at_once:
                self.settle()
        now = ExpertReport(
            balancedness=self.balancedness, num_placements=self.num_placements, num_copies=self.num_copies
        )
        if now == self._told:
            return None
        self._told = now
        return now

    def settle(self) -> None:
        while not self.is_idle:
            if isinstance(self._placing, _Placing):
                self._placing.join()
            if self._placing:
                self._poll()
            else:
                self._move()

    def close(self) -> None:
        if isinstance(self._placing, _Placing):
            self._placing.join(_CLOSE_SECONDS)
        self._queue.close()
        if self._record is not None:
            self._record.close()

    @property
    def is_idle(self) -> bool:
        """Whether neither a decision nor a move is under way; equal on all ranks."""
        return self._moving is None and not self._placing

    def _begin(self) -> None:
        loads = self._group.all_reduce(self._window.total())
        self._placing = True
        if self._group.rank == 0:
            copy = self._streams.copy_out({"loads": loads})
            self._placing = _Placing(self, copy, self._window.num_steps, self._step)
            self._placing.start()

    def place(self, found: LoadRecord) -> bytes:
        """Has the policy place the experts; returns what all ranks `_read`. Raises what the policy raises."""
        if self._record is not None:
            try:
                self._record.write(found)
            except OSError as error:
                logger.warning("the trace of expert loads ends here: %s", error)
                self._record = None
        current = self._maps.placement
        share = balancedness(current.rank_loads(found.loads, self._shape.num_ranks))
        if self._logs:
            logger.info("experts of %d steps: balancedness %.3f", found.num_steps, share)
        made = self._balancer.place(found.loads, self._shape, current)
        if problems := made.problems(self._maps.num_layers, self._maps.num_experts, self._maps.num_slots):
            raise ValueError(f"its answer is no placement: {'; '.join(problems)}")
        if np.array_equal(made.expert_of, self._maps.placement.expert_of):
            return _SHARE.pack(share)
        return _SHARE.pack(share) + made.expert_of.tobytes() + made.replica_of.tobytes()

    def _read(self, data: bytes) -> ExpertPlacement:
        both = np.frombuffer(data, dtype=np.int32).reshape(2, self._maps.num_layers, self._maps.num_slots)
        return ExpertPlacement(both[0], both[1])

    def _poll(self) -> None:
        placing = self._placing
        own = placing.answer if isinstance(placing, _Placing) and not placing.is_alive() else b""
        answer = self._group.host.gather(own)[0]
        if not answer:
            return
        self._placing = False
        if answer == _FAILED:
            return
        self.balancedness = _SHARE.unpack_from(answer)[0]
        if len(answer) > _SHARE.size:
            self.num_placements += 1
            self._moving = self._moves(self._read(answer[_SHARE.size :]))
            self._move()

    def _move(self) -> None:
        if self._moving is not None and next(self._moving, self) is self:
            self._moving = None

    def _moves(self, placement: ExpertPlacement) -> Iterator[None]:
        """Moves layer by layer; each `next` does what enters one step, on every rank the same."""
        for layer in range(self._maps.num_layers):
            before, after = self._maps.placement.expert_of[layer], placement.expert_of[layer]
            if np.array_equal(before, after):
                continue
            moves = plan_moves(before, after, self._shape, self._group.rank, self._rows_per_step)
            places = {expert: place for place, expert in enumerate(dict.fromkeys(expert for _, expert in moves.fills))}
            self._queue.run(partial(self._keep, layer, moves.kept, places))
            held = {int(expert): slot for slot, expert in enumerate(self._own(before))}
            for transfers in moves.rounds:
                self.num_copies += len(transfers)
                self.num_received += sum(one.receiver == self._group.rank for one in transfers)
                self._queue.run(partial(self._exchange, layer, transfers, held, places))
                yield
            if not moves.rounds:
                yield
            self._commit(layer, moves, places)
            self._maps.write(layer, placement)

    def _own(self, slots: np.ndarray) -> np.ndarray:
        count = self._shape.slots_per_rank
        own: np.ndarray = slots[self._group.rank * count : (self._group.rank + 1) * count]
        return own

    def _keep(self, layer: int, kept: Mapping[int, int], places: Mapping[int, int]) -> None:
        """Copies the experts that this rank had in other slots."""
        for expert, slot in kept.items():
            for buffer, rows in zip(self._buffer, self._bytes[layer], strict=True):
                buffer[places[expert]].copy_(rows[slot])

    def _exchange(
        self, layer: int, transfers: Sequence[Transfer], held: Mapping[int, int], places: Mapping[int, int]
    ) -> None:
        """Sends and receives the experts of one round, in order of rank, all weights of an expert in one row."""
        me, ranks = self._group.rank, range(self._group.size)
        sends = [[one.expert for one in transfers if (one.sender, one.receiver) == (me, rank)] for rank in ranks]
        receives = [[one.expert for one in transfers if (one.sender, one.receiver) == (rank, me)] for rank in ranks]
        rows = self._bytes[layer]
        out = [torch.cat([one[held[expert]] for one in rows]) for experts in sends for expert in experts]
        width = sum(one.shape[1] for one in rows)
        packed = torch.stack(out) if out else rows[0].new_empty(0, width)
        came = self._group.all_to_all(packed, [len(one) for one in sends], [len(one) for one in receives])
        for row, expert in zip(came, (expert for experts in receives for expert in experts), strict=True):
            parts = row.split([one.shape[1] for one in rows])
            for buffer, part in zip(self._buffer, parts, strict=True):
                buffer[places[expert]].copy_(part)

    def _commit(self, layer: int, moves: LayerMoves, places: dict[int, int]) -> None:
        """Puts the experts into their slots, in the main queue between two steps."""
        self._queue.join()
        for slot, expert in moves.fills:
            for buffer, rows in zip(self._buffer, self._bytes[layer], strict=True):
                rows[slot].copy_(buffer[places[expert]])


def _as_bytes(layer: int, tensors: Sequence[Tensor], num_slots: int) -> list[Tensor]:
    """The weights as bytes [slots, …], which any communicator moves whatever their type."""
    for tensor in tensors:
        if not tensor.is_contiguous() or not tensor.ndim or tensor.shape[0] != num_slots or not tensor.numel():
            shape, stride = list(tensor.shape), tensor.stride()
            raise ValueError(
                f"weights {shape} with strides {stride} of the experts of layer {layer} cannot be moved: they must be "
                f"contiguous, with a row for each of {num_slots} slots"
            )
    return [tensor.detach().view(num_slots, -1).view(torch.uint8) for tensor in tensors]
