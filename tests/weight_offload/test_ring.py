"""Which copies the ring makes when, and what it waits for; a step that is captured with its copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frame.core.layers.linear import MethodLayer
from frame.core.ops import Ops
from frame.interfaces import Mark, SideQueue
from frame.weight_offload.host_bytes import LEAST_BYTES, HostBytes, piece_sizes
from frame.weight_offload.kept import KeptLayer
from frame.weight_offload.ring import WeightRing
from tests.plugins.platforms.tape import Tape

SIZE = 6


class Product(MethodLayer):
    """y = W x + b."""

    def __init__(self, seed: int) -> None:
        super().__init__(SimpleNamespace(ops=Ops(), dtype=torch.float32, device=torch.device("cpu")))  # type: ignore[arg-type]
        self.spec = f"number {seed}"
        self.method = Plain()
        generator = torch.Generator().manual_seed(seed)
        self.weight, self.bias = self.empty(SIZE, SIZE), self.empty(SIZE)
        self.weight.data.copy_(torch.randn(SIZE, SIZE, generator=generator))
        self.bias.data.copy_(torch.randn(SIZE, generator=generator))


class Plain:
    """Negates weights when they have arrived, and again before others come."""

    stages, takes_parts = False, True

    def begin_load(self, layer: Product) -> None:
        layer.weight.neg_()

    def finish_load(self, layer: Product) -> None:
        layer.weight.neg_()

    def pack(self, layer: Product) -> None:
        raise AssertionError("weights in host memory are not packed")

    unpack = pack


class Layer(nn.Module):
    """Two products."""

    def __init__(self, seed: int, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.first, self.second = Product(2 * seed), Product(2 * seed + 1)
        self._seed, self._log = seed, log

    def forward(self, x: Tensor) -> Tensor:
        self._log.append(("compute", self._seed))
        for part in (self.first, self.second):
            x = torch.tanh(torch.nn.functional.linear(x, part.weight, part.bias))
        return x


class Stack(nn.Module):
    """Layers one after another; of those that `lacks` names the call fails."""

    def __init__(self, count: int, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed, log) for seed in range(count))
        self.fails = -1

    def forward(self, x: Tensor, chosen: range | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.fails:
                raise RuntimeError("a layer that fails")
            if chosen is None or number in chosen:
                x = layer(x)
        return x

    def finish_load(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "finish_load"):
                module.finish_load()


class NotedMark(Mark):
    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def before_main(self) -> None:
        self._note()


class LazyQueue(SideQueue):
    """Copies only when somebody waits; notes what it is given and what is waited for, by the layer."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        self._log = log
        self._work: list[tuple[int, Callable[[], None]]] = []
        self.hosts: dict[int, int] = {}
        self.fails = self.num_failures = -1

    def run(self, work: Callable[[], None]) -> None:
        index = self.hosts[id(work.func.__self__)]  # type: ignore[attr-defined]
        self._log.append(("copy", index))
        self._work.append((index, work))

    def mark(self) -> Mark:
        return NotedMark(partial(self._arrive, len(self._work), self._work[-1][0]))

    def _arrive(self, count: int, index: int) -> None:
        self._log.append(("wait", index))
        for place, (copied, work) in enumerate(self._work[:count]):
            self._work[place] = (index, lambda: None)
            if copied == self.fails and self.num_failures > 0:
                self.num_failures -= 1
                raise OSError("a copy that fails")
            work()


def make(count: int, num_places: int, queue: Any = None) -> tuple[Stack, WeightRing, list[tuple[str, int]], Stack]:
    """(a stack with a ring, the ring, what happens, the same stack without)"""
    log: list[tuple[str, int]] = []
    stack, plain = Stack(count, log), Stack(count, [])
    queue = queue or LazyQueue(log)
    kept = [
        KeptLayer(layer, index, partial(torch.empty, dtype=torch.uint8)) for index, layer in enumerate(stack.layers)
    ]
    if isinstance(queue, LazyQueue):
        queue.hosts = {id(one.host): one.index for one in kept}
    first = torch.empty(max(one.num_bytes for one in kept), dtype=torch.uint8)
    ring = WeightRing(kept, num_places, first, queue)
    ring.watch(stack)  # type: ignore[arg-type]
    stack.weight_ring = ring
    stack.finish_load()
    log.clear()
    return stack, ring, log, plain


X = torch.linspace(-1, 1, SIZE)


def test_copies_are_given_ahead_and_only_what_is_needed_is_waited_for() -> None:
    stack, _, log, plain = make(5, 3)
    assert torch.equal(stack(X), plain(X))
    one_step = [
        ("compute", 0), ("copy", 3), ("compute", 1), ("copy", 4), ("compute", 2), ("copy", 2),
        ("wait", 3), ("compute", 3), ("copy", 0), ("wait", 4), ("compute", 4), ("copy", 1),
        ("wait", 0), ("wait", 1), ("wait", 2),
    ]  # fmt: skip
    assert log == one_step
    assert torch.equal(stack(X), plain(X))
    assert log == one_step * 2  # each step begins as the one before


@pytest.mark.parametrize(("count", "places"), [(3, 2), (4, 3), (7, 2), (7, 6), (8, 4)])
def test_any_number_of_layers_and_places(count: int, places: int) -> None:
    stack, _, log, plain = make(count, places)
    for _ in range(3):
        assert torch.equal(stack(X), plain(X))
    assert sum(kind == "copy" for kind, _ in log) == 3 * count


@pytest.mark.parametrize("chosen", [range(0, 1), range(3, 5), range(0, 5, 4), range(1, 5, 2), range(0)])
def test_steps_that_leave_layers_out(chosen: range) -> None:
    stack, _, _, plain = make(5, 2)
    for some in (chosen, None, chosen, chosen, None):
        assert torch.equal(stack(X, some), plain(X, some))


@pytest.mark.parametrize("fails", range(5))
def test_a_step_that_fails_anywhere(fails: int) -> None:
    stack, ring, _, plain = make(5, 2)
    stack.fails = fails
    with pytest.raises(RuntimeError, match="a layer that fails"):
        stack(X)
    stack.fails = -1
    for index in range(2):  # as a captured step, which asks nobody, would find them
        found = ring._place(index)[: ring._layers[index].num_bytes].clone()
        ring._layers[index].host.copy_to(ring._place(index), 0, len(found))
        assert torch.equal(found, ring._place(index)[: len(found)])
    assert torch.equal(stack(X), plain(X))


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.parametrize("fails", range(5))
def test_copies_that_fail(fails: int, num_failures: int) -> None:
    """In the middle of a step, at its end, and when the ring is put in order after that."""
    stack, ring, _, plain = make(5, 2)
    queue: Any = ring._queue
    queue.fails, queue.num_failures = fails, num_failures
    for _ in range(num_failures + 1):
        with suppress(OSError):
            assert torch.equal(stack(X), plain(X))
    assert queue.num_failures == 0
    assert torch.equal(stack(X), plain(X))


def test_a_captured_step_makes_its_copies_itself() -> None:
    """The operators of one step, replayed: before and after steps that run, fail or leave layers out."""
    stack, _, log, plain = make(7, 3, SideQueue())
    given = X.clone()
    with Tape() as tape:
        out = stack(given)
    calls = len(log)
    for number in range(6):
        given.copy_(X * number)
        tape.replay()
        assert torch.equal(out, plain(given))
        assert len(log) == calls
        stack(X, range(number, 7, 2))
        stack.fails = number
        with pytest.raises(RuntimeError):
            stack(X)
        stack.fails, calls = -1, len(log)


def test_weights_are_loaded_in_place_and_kept() -> None:
    """Whatever the order: parts of a place by turns, some twice, and one after all others."""
    stack, _, _, plain = make(5, 2)
    order = [(0, "first"), (2, "first"), (0, "second"), (4, "second"), (0, "first"), (3, "first"), (2, "second")]
    for number, (index, name) in enumerate(order):
        for each in (stack, plain):
            part = getattr(each.layers[index], name)
            if each is stack:
                part.begin_load()
            part.weight.data[number % SIZE].fill_(number)
            part.bias.data.fill_(number)
        getattr(plain.layers[index], name).weight.data[number % SIZE].neg_()  # as the method does at the end
    stack.finish_load()
    for _ in range(2):
        assert torch.equal(stack(X), plain(X))
    assert all(layer.first.method.takes_parts for layer in stack.layers)


def test_a_weight_that_a_method_replaces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, _, _, _ = make(3, 2)
    monkeypatch.setattr(
        Plain, "finish_load", lambda self, layer: setattr(layer.weight, "data", layer.weight.data.clone())
    )
    stack.layers[1].second.begin_load()
    with pytest.raises(RuntimeError, match="Product number 3 has moved a weight while it was loaded"):
        stack.finish_load()


def test_host_memory_is_taken_in_powers_of_two() -> None:
    for size in (1, LEAST_BYTES, LEAST_BYTES + 1, 436 << 20, (256 << 20) * 3):
        sizes = piece_sizes(size)
        assert all(one & (one - 1) == 0 for one in sizes)
        assert size <= sum(sizes) < size + LEAST_BYTES


def test_bytes_go_to_the_pieces_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.weight_offload.host_bytes.LEAST_BYTES", 8)
    monkeypatch.setattr("frame.weight_offload.host_bytes.MOST_BYTES", 16)
    given: list[int] = []
    host = HostBytes(52, lambda size: (given.append(size), torch.zeros(size, dtype=torch.uint8))[1])
    assert given == [16, 16, 16, 8]
    assert host.num_bytes == 56
    values = torch.arange(52, dtype=torch.uint8)
    host.put(0, values.view(torch.int32))
    found = torch.zeros(60, dtype=torch.uint8)
    host.copy_to(found, 10, 50)
    assert torch.equal(found[10:50], values[10:50])
    assert not found[:10].any()
    assert not found[50:].any()
    host.copy_from(torch.full((60,), 7, dtype=torch.uint8), 15, 33)
    host.copy_to(found, 0, 52)
    assert torch.equal(found[:52], torch.cat([values[:15], torch.full((18,), 7, dtype=torch.uint8), values[33:]]))
