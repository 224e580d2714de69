"""Draws from parts of the vocabulary: the tokens of whole rows, and only three numbers a row between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from frame.core.config.flat import from_flat
from frame.core.interfaces.setup import ProcessorSetup
from frame.core.interfaces.step import TokenMasks
from frame.core.ops import Ops
from frame.core.ops.random import seed_stream
from frame.core.plugin_host.registry import Registry
from frame.core.worker.sample.draws import Ahead
from frame.core.worker.sample.sampler import Sampler
from frame.core.worker.sample.shards import DividedVocabulary, Part, Rows, WholeVocabulary, vocabulary_of
from frame.core.worker.start.attention_binding import choose_backends
from frame.core.worker.start.model_loading import load_model
from frame.core.worker.start.open_device import open_device
from frame.core.worker.start.trial_steps import TrialSteps
from frame.interfaces import Groups, LogitsProcessor, Mesh, Placement, SamplingParams, UnconnectedGroup
from frame.kept_weights.holder import NoHolder
from frame.kernels import sampling as kernels
from frame.layers import Head
from frame.plugins.platforms.cpu_ops import CpuOps
from frame.plugins.platforms.cuda.compile.rehearsal import Zeros
from frame.plugins.platforms.torch_collectives import TorchCollectives
from frame.testing import run_mesh
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, prompts, request, running, tokens_of
from frame.testing.thread_executor import with_threads
from tests.layers.test_weights import make_build
from tests.worker.sampling import make_sampler, new_request

NGRAM = {"speculator": "ngram", "plugin": {"ngram": {"prompt_lookup_max": 2}}}


class Table:
    """The rows of a rank, as `VocabRows` divides them."""

    def __init__(self, vocab_size: int, size: int, rank: int) -> None:
        self.num_rows = -(-vocab_size // size)
        self.start = rank * self.num_rows
        self.num_used = max(0, min(vocab_size - self.start, self.num_rows))


@settings(max_examples=150, deadline=None)
@given(
    vocab_size=st.integers(1, 300),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([1, 2, 8, 1000]),
    ops=st.sampled_from([Ops(), CpuOps()]),
    random=st.booleans(),
)
def test_the_best_of_all_parts_is_that_of_the_row(
    vocab_size: int, size: int, seed: int, levels: int, ops: Ops, random: bool
) -> None:
    """`levels` few: many ties, within parts and between them."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, vocab_size, generator=generator) * levels).round() / levels
    temperature, positions = torch.tensor([0.0, 0.5, 1.0, 3.0]), torch.arange(4) * 7
    streams = torch.tensor([seed_stream(seed + row) for row in range(4)])
    noise = (temperature, streams, positions) if random else ()
    tables = [table for rank in range(size) if (table := Table(vocab_size, size, rank)).num_used]
    found = [ops.best_of_part(logits[:, one.start : one.start + one.num_used], one.start, *noise) for one in tables]
    scores = torch.stack([one[0] for one in found])
    tokens, values = ops.join_parts(torch.stack([torch.stack([x.view(torch.int32) for x in one]) for one in found]))
    whole = ops.draw(logits, *noise) if random else ops.greedy(logits)[0]
    if random:
        # the logarithms of noise may differ in the last bit by where a value lies in a vector
        close = scores.sort(0, descending=True).values
        near = torch.zeros(4, dtype=torch.bool) if len(tables) < 2 else (close[0] - close[1]) < 1e-5
        assert torch.equal(tokens[~near], whole[~near])
    else:
        assert torch.equal(tokens, whole)
    assert torch.equal(values, logits.gather(1, tokens.long()[:, None]).squeeze(1))


@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_row_that_is_not_finite_shows_it(place: int) -> None:
    logits = torch.randn(1, 10)
    logits[0, place] = float("nan")
    found = [Ops.best_of_part(logits[:, first : first + 5], first) for first in (0, 5)]
    words = torch.stack([torch.stack([one.view(torch.int32) for one in part]) for part in found])
    tokens, values = Ops.join_parts(words)
    assert tokens.tolist() == [place]
    assert values.isnan().all()


class Counting(TorchCollectives):
    """Collectives over gloo that note how much each gather sends."""

    def __init__(self, placement: Any) -> None:
        super().__init__(placement)
        self.sent: list[int] = []

    def group(self, name: str, ranks: tuple[int, ...]) -> Any:
        group = super().group(name, ranks)
        gather = group.all_gather

        def counted(tensor: Tensor, dim: int = 0) -> Tensor:
            self.sent.append(tensor.numel())
            return gather(tensor, dim)

        group.all_gather = counted  # type: ignore[method-assign]
        return group


class OneHead(nn.Module):
    """A model that is only a head."""

    divides_logits = True

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out * 2


class ByIds(OneHead):
    """Treats a token by its id, and says nothing of it."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        logits[:, 3] = -1e9
        return logits


def head_of(groups: Groups, vocab_size: int) -> Head:
    """A head with weights that depend on the token alone."""
    head = Head(make_build(groups.tensor), "head", 16, vocab_size)
    table = head.table
    ids = torch.arange(table.start, table.start + table.num_rows)
    table.weight.data[:] = torch.sin(ids[:, None] * 1.7 + torch.arange(16) * 0.3)
    table.weight.data[table.num_used :] = 0
    return head


@pytest.mark.parametrize("vocab_size", [64, 61])
def test_ranks_exchange_three_numbers_a_row(vocab_size: int) -> None:
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    temperature, streams = torch.tensor([0.0, 1.0, 1.0, 0.3, 2.0]), torch.arange(5) * 12345
    alone = Rows(OneHead(head_of(Groups.single(), vocab_size)), WholeVocabulary(Ops()))  # type: ignore[arg-type]
    made: list[Counting] = []

    def connect(placement: Any) -> Counting:
        made.append(Counting(placement))
        return made[-1]

    def work(groups: Groups) -> list[tuple[Tensor, Tensor]]:
        model: Any = OneHead(head_of(groups, vocab_size))
        vocabulary = vocabulary_of(model, Ops())
        assert isinstance(vocabulary, DividedVocabulary)
        rows = Rows(model, vocabulary)
        return [rows.draw(hidden), rows.draw(hidden, temperature, streams, torch.arange(5))]

    found = run_mesh(Mesh(tensor=3), work, collectives=connect)
    expected = [alone.draw(hidden), alone.draw(hidden, temperature, streams, torch.arange(5))]
    for rank in found:
        for (tokens, logits), (whole, values) in zip(rank, expected, strict=True):
            assert torch.equal(tokens, whole)
            torch.testing.assert_close(logits, values)
    assert {count for one in made for count in one.sent} == {3 * 5}


@dataclass
class Batch:
    """Requests of one batch, a row each, their logits' seed, and how many rows their draw may gather, in order."""

    kinds: list[dict[str, Any]]
    gathered: list[int]
    masked: tuple[int, ...] = ()
    mode: str = "raw_logprobs"


GREEDY, RANDOM = {"temperature": 0}, {"temperature": 0.9, "seed": 3}
EDITED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.4},
    {"presence_penalty": 0.8, "temperature": 0.8},
    {"logit_bias": {3: 4.0, 40: 5.0, 60: -100.0}},
    {"logit_bias": {60: 90.0}, "temperature": 1.0},
    {"allowed_token_ids": [5, 17]},
    {"allowed_token_ids": [1, 2, 30, 58], "temperature": 2.0},
    {"bad_words_token_ids": [[7, 9], [8]], "min_tokens": 9, "stop_token_ids": [20, 44]},
]
BATCHES = {
    "edited": Batch([*EDITED, GREEDY, RANDOM], []),
    "masked": Batch([GREEDY, RANDOM, *EDITED[:3]], [], masked=(0, 1, 3)),
    "filtered": Batch([{**EDITED[1], "top_k": 5}, *EDITED, {**RANDOM, "top_p": 0.6, "min_p": 0.01}], [2]),
    "all filtered": Batch([{**RANDOM, "top_k": 4}, {**EDITED[3], "top_p": 0.7}], [2]),
    "log-probabilities": Batch([{**GREEDY, "logprobs": 2}, RANDOM, GREEDY, {**RANDOM, "logprobs": 0}], [2]),
    "edited log-probabilities": Batch([*EDITED, {**EDITED[0], "logprobs": 3}, {**RANDOM, "logprobs": -1}], [1, 1]),
    "processed": Batch([{**RANDOM, "top_k": 6, "logprobs": 3}, EDITED[0], GREEDY], [1], (2,), "processed_logprobs"),
    "processed logits": Batch([{**EDITED[0], "logprobs": 1}, GREEDY], [1], mode="processed_logits"),
    "all of it": Batch([{**RANDOM, "top_k": 6, "logprobs": 3}] * 3, [3]),
}


def steps_of(sampler: Sampler, batch: Batch, logits_of: Callable[[int], Tensor], ahead: bool) -> list[Any]:
    """Three draws of a batch's tokens, logits and log-probabilities, with drafts before each or without."""
    count, found = len(batch.kinds), list[Any]()
    for slot, kind in enumerate(batch.kinds):
        sampler.add(new_request(slot, prompt=(1, 2, 3, 31), output=(7, 50), **kind))
    sampler.apply_staged_writes()
    slots = np.arange(count, dtype=np.int32)
    words = np.random.default_rng(5).integers(-(2**31), 2**31, (len(batch.masked), 2)).astype(np.int32)
    masks = TokenMasks(slots=np.array(batch.masked, np.int32), words=words).packed() if batch.masked else b""
    drafts = torch.arange(2 * count, dtype=torch.int32).view(count, 2) * 7 % 61
    drafts[:, 1] = torch.where(torch.arange(count) % 2 == 0, -1, drafts[:, 1])
    for step in range(3):
        lengths = torch.full((count,), 6 + step)
        before = Ahead(drafts, (drafts >= 0).sum(1)) if ahead else None
        sampled = sampler.sample(logits_of(step).clone(), slots, lengths, masks, before)
        if ahead:
            tokens = torch.stack((sampled.token_ids, torch.full_like(sampled.token_ids, -1)), 1)
            sampler.remember(tokens, torch.ones(count, dtype=torch.int32), slots)
        found.append(sampled.tensors())
    return found


@pytest.mark.parametrize("ahead", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("vocab_size", [64, 61])
def test_ranks_draw_from_their_parts_what_one_draws(vocab_size: int, name: str, ahead: bool) -> None:
    """And gather the rows that filter or tell log-probabilities, once, and no others."""
    batch, size = BATCHES[name], 3
    count = len(batch.kinds)
    hidden = [torch.randn(count, 16, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    made: list[Counting] = []

    def connect(placement: Any) -> Counting:
        made.append(Counting(placement))
        return made[-1]

    def work(groups: Groups) -> list[Any]:
        model: Any = OneHead(head_of(groups, vocab_size))
        vocabulary = vocabulary_of(model, Ops())
        sampler = make_sampler(vocab_size=vocab_size, max_slots=16, logprobs_mode=batch.mode, vocabulary=vocabulary)
        return steps_of(sampler, batch, lambda step: Rows(model, vocabulary).logits(hidden[step]), ahead)

    (expected,) = run_mesh(Mesh(), work)
    for rank in run_mesh(Mesh(tensor=size), work, collectives=connect):
        for mine, one in zip(rank, expected, strict=True):
            assert mine.keys() == one.keys()
            for key, tensor in one.items():
                torch.testing.assert_close(mine[key], tensor, rtol=1e-5, atol=1e-5)
    columns, best = -(-vocab_size // size), [] if name in ("all filtered", "all of it") else [3 * count]
    for one in made:
        assert sorted(one.sent) == sorted(3 * [*best, *(rows * columns for rows in batch.gathered)])


class Doubling(LogitsProcessor):
    """Doubles what it is given, and sees whole rows only."""

    def __init__(self, invariant: bool) -> None:
        super().__init__(ProcessorSetup(torch.device("cpu"), 16))
        self.argmax_invariant, self.seen = invariant, list[tuple[int, ...]]()

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        return slot in (1, 3)

    def remove(self, slot: int) -> None: ...

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        self.seen.append((*logits.shape, *slots))
        return logits * 2 if self.argmax_invariant else logits.flip(-1)


@pytest.mark.parametrize("invariant", [False, True])
def test_processors_get_whole_rows(invariant: bool) -> None:
    batch = Batch([EDITED[0], {**EDITED[2], "frequency_penalty": 1.0}, GREEDY, {**RANDOM, "logprobs": 1}], [])
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))

    def work(groups: Groups) -> tuple[list[Any], list[tuple[int, ...]]]:
        model: Any = OneHead(head_of(groups, 61))
        vocabulary, processor = vocabulary_of(model, Ops()), Doubling(invariant)
        sampler = make_sampler(vocab_size=61, max_slots=16, processors=[processor], vocabulary=vocabulary)
        return steps_of(sampler, batch, lambda _: Rows(model, vocabulary).logits(hidden), False), processor.seen

    ((expected, _),) = run_mesh(Mesh(), work)
    for found, seen in run_mesh(Mesh(tensor=2), work):
        for mine, one in zip(found, expected, strict=True):
            for key, tensor in one.items():
                torch.testing.assert_close(mine[key], tensor, rtol=1e-5, atol=1e-5)
        assert set(seen) == {(2, 61, 1, 3)} or (invariant and set(seen) == {(1, 61, 3), (2, 61, 1, 3)})


@given(vocab_size=st.integers(1, 200), size=st.integers(1, 6), seed=st.integers(0, 99))
def test_masks_are_cut_by_the_parts(vocab_size: int, size: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (2, -(-vocab_size // 32))).astype(np.int32)
    whole = torch.zeros(2, vocab_size)
    Ops.apply_bitmask(whole, torch.arange(2), torch.from_numpy(words))
    for rank in range(size):
        table = Table(vocab_size, size, rank)
        if table.num_used:
            part = torch.zeros(2, table.num_used)
            cut = Part(table.start, table.num_used, vocab_size).words(words)
            Ops.apply_bitmask(part, torch.arange(2), torch.from_numpy(cut.copy()))
            assert torch.equal(part, whole[:, table.start : table.start + table.num_used])


def test_whole_rows_where_parts_would_not_do() -> None:
    def kinds(groups: Groups) -> list[type]:
        two = OneHead(nn.ModuleList([head_of(groups, 64), head_of(groups, 64)]))
        models = [ByIds(head_of(groups, 64)), two, OneHead(head_of(groups, 4)), OneHead(nn.Identity())]
        return [type(vocabulary_of(model, Ops())) for model in models]  # type: ignore[arg-type]

    assert run_mesh(Mesh(tensor=3), kinds) == [[WholeVocabulary] * 4] * 3


@pytest.mark.parametrize(
    "speculator", [{}, {"speculator": "ngram", "plugin": {"ngram": {"prompt_lookup_max": 2}}}], ids=["", "drafts"]
)
def test_two_ranks_draw_what_one_does(speculator: dict[str, Any], tmp_path: Path) -> None:
    """Greedy, seeded, filtered, edited and with log-probabilities, in one batch and alone."""
    folder = make_checkpoint(tmp_path, "llama")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.1, "seed": 4, "top_k": 9},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0, "presence_penalty": 1.5, "logit_bias": {7: 3.0, 200: 2.0}, "logprobs": 1},
        {"temperature": 0.7, "seed": 6, "min_p": 0.05, "allowed_token_ids": [*range(40, 220, 3)]},
        {"temperature": 0, "bad_words_token_ids": [[11], [12, 13]]},
    ]
    given_prompts = prompts(400)

    def tokens(**settings_: Any) -> list[dict[str, Any]]:
        values = {**SMALL, "model": str(folder), "num_threads": 1, **speculator, **settings_}
        with running(from_flat(values), with_threads(Registry.load())) as engine:
            found = []
            for batch in ([0, 1], [2], [0, 1, 2, 3], [0, 4], [4, 6, 7], [*range(8)]):
                wanted = [
                    request(f"{place}", given_prompts[place % len(given_prompts)], **kinds[place]) for place in batch
                ]
                found.append({name: list(tokens_of(one)) for name, one in drain(engine, wanted).items()})
            return found

    assert tokens(tensor_parallel_size=2, executor="threads") == tokens()


def test_trial_steps_without_the_other_ranks_draw_tokens_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks that are not there would send is whatever the memory holds; kernels read out of bounds by such ids."""
    garbage = UnconnectedGroup.all_gather

    def all_gather(self: UnconnectedGroup, tensor: Tensor, dim: int = -1, sizes: Any = None) -> Tensor:
        found = garbage(self, tensor, dim, sizes)
        return found.fill_(float("nan")) if found.is_floating_point() else found.fill_(1 << 30)

    monkeypatch.setattr(UnconnectedGroup, "all_gather", all_gather)
    monkeypatch.setattr(UnconnectedGroup, "all_reduce", lambda self, tensor: torch.full_like(tensor, float("nan")))
    folder = make_checkpoint(tmp_path, "llama")
    config = from_flat(
        {"model": str(folder), "tensor_parallel_size": 2, "num_threads": 1, "max_num_seqs": 8,
         "max_num_batched_tokens": 64, "max_model_len": 64, "dtype": "float32"}
    )  # fmt: skip
    registry = Registry.load()
    drawn: list[Tensor] = []
    draw = DividedVocabulary.best

    def noted(self: DividedVocabulary, *given: Any) -> tuple[Tensor, Tensor]:
        found = draw(self, *given)
        drawn.append(found[0])
        return found

    monkeypatch.setattr(DividedVocabulary, "best", noted)
    for rank in range(2):
        opened = open_device(config, registry, Placement(rank=rank, local_rank=rank, mesh=Mesh(tensor=2)), "")
        before = opened.platform.memory().snapshot()
        loaded = load_model(config, opened.checkpoint, opened.platform, registry, opened.groups, before, NoHolder())
        chosen = choose_backends(loaded.build.caches, config, registry, loaded.build.own_caches)
        TrialSteps(opened, loaded, chosen).run()
    assert drawn
    assert all(bool(((ids >= 0) & (ids < opened.checkpoint.vocab_size)).all()) for ids in drawn)


class Unlaunched:
    """A kernel that is only compiled."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **named: None


@pytest.mark.parametrize("first", [0, 70_000])
def test_kernels_that_are_not_launched_draw_a_token_that_there_is(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are compiled, new tensors are zeros, which every vocabulary has."""
    for name in ("_best_of_part", "_best_of_row"):
        monkeypatch.setattr(kernels, name, Unlaunched())
    noise = torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with Zeros():
        _, ids, _ = kernels.best_of_part(torch.randn(3, 600), first, *noise)
    assert ids.tolist() == [0] * 3


def test_an_engine_gathers_the_filtered_request_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = make_checkpoint(tmp_path, "llama"), list[int]()
    gathered = Head.gathered
    monkeypatch.setattr(Head, "gathered", lambda self, part: seen.append(len(part)) or gathered(self, part))
    values = {**SMALL, "model": str(folder), "num_threads": 1, "tensor_parallel_size": 2, "executor": "threads"}
    edited = {"temperature": 0.9, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}}
    kinds: list[dict[str, Any]] = [{"temperature": 0}, edited, {"temperature": 1.1, "top_p": 0.7}]
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        seen.clear()  # what the start has tried
        drain(engine, [request(str(row), prompts(400)[row], **kind) for row, kind in enumerate(kinds)])
    assert set(seen) == {1}
