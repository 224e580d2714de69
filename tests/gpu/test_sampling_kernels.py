"""Greedy choice and the draw against their references, id for id: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import triton
import triton.language as tl

from frame.core.ops import random as noise, sampling
from frame.kernels import join, sampling as kernels
from frame.kernels.noise import gumbel_noise, noise_size
from frame.kernels.reach import bar_of, over_bar

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
#: The interpreter takes milliseconds for a block.
WIDE = 20000 if DEVICE == "cuda" else 2600


def make_logits(rows: int, vocab: int) -> torch.Tensor:
    return (torch.randn(rows, vocab) * 3).to(DEVICE)


@pytest.mark.parametrize("vocab", [7, 1024, WIDE])
def test_greedy_takes_the_lowest_of_equal_ids(vocab: int) -> None:
    logits = make_logits(5, vocab)
    logits[1, 2] = logits[1, vocab - 1] = 99.0
    logits[2] = 1.0
    tokens, values = kernels.greedy(logits)
    expected = logits.cpu().max(-1).values
    first = (logits.cpu() == expected[:, None]).int().argmax(-1)
    assert tokens.tolist() == first.tolist()
    assert torch.equal(values.cpu(), expected)


def test_a_row_that_is_not_finite_shows_it() -> None:
    logits = make_logits(4, WIDE)
    logits[0, 2500] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    tokens, values = kernels.greedy(logits)
    assert tokens[0] == 2500
    assert [bool(value.isfinite()) for value in values] == [False, False, False, True]
    assert all(0 <= token < WIDE for token in tokens.tolist())


@pytest.mark.parametrize("vocab", [7, WIDE])
def test_the_draw_is_the_reference_id_for_id(vocab: int) -> None:
    rows = 64 if DEVICE == "cuda" else 4
    logits = make_logits(rows, vocab)
    temperature = torch.tensor([0.0, 0.6, 1.0, 2.0] * (rows // 4), device=DEVICE)
    seeds = [noise.seed_stream(seed) for seed in range(rows)]
    streams = torch.tensor(seeds, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(rows, dtype=torch.int64, device=DEVICE) * 37
    found = kernels.draw(logits, temperature, streams, positions)
    expected = sampling.draw(logits.clone(), temperature, streams, positions)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab", [301, WIDE])
@pytest.mark.parametrize("random", [False, True])
def test_the_best_of_parts_is_what_the_whole_row_draws(vocab: int, random: bool) -> None:
    """Parts of unequal sizes, with ties between them; scores and ids are the reference's."""
    rows = 8
    logits = make_logits(rows, vocab).round()
    temperature = torch.tensor([0.0, 0.6, 1.0, 2.0] * (rows // 4), device=DEVICE)
    streams, positions = (value.to(DEVICE) for value in noise_of(rows))
    noise_given = (temperature, streams, positions) if random else ()
    cuts = [0, vocab // 3, vocab // 3 + 7, vocab]
    scores, ids, values = [], [], []
    for first, end in itertools.pairwise(cuts):
        part = logits[:, first:end]
        found = kernels.best_of_part(part, first, *noise_given)
        expected = sampling.best_of_part(part, first, *noise_given)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
        for kept, one in zip((scores, ids, values), found, strict=True):
            kept.append(one)
    winner = torch.stack(scores).argmax(0, keepdim=True)
    tokens = torch.stack(ids).gather(0, winner).squeeze(0)
    whole = kernels.draw(logits, temperature, streams, positions) if random else kernels.greedy(logits)[0]
    assert torch.equal(tokens, whole)


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_are_joined_as_by_the_reference(rows: int, size: int) -> None:
    """With ties, NaN, and rows in which nothing is finite."""
    words = words_of(size, rows)
    tokens, values = join.join_parts(words.to(DEVICE))
    expected, logits = sampling.join_parts(words)
    assert torch.equal(tokens.cpu(), expected)
    assert torch.equal(values.cpu(), logits)


def words_of(size: int, rows: int) -> torch.Tensor:
    """int32 [size, 3, rows]: scores of few levels, token ids and logits of each part."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(size, rows, generator=generator).round()
    scores[torch.rand(size, rows, generator=generator) < 0.2] = torch.nan
    scores[:, ::3] = torch.randn(rows, generator=generator)[::3].round()
    scores[:, 4::5] = -torch.inf
    ids = torch.randint(0, 1 << 30, (size, rows), generator=generator, dtype=torch.int32)
    return torch.stack((scores.view(torch.int32), ids, torch.randn(size, rows).view(torch.int32)), 1)


def noise_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(streams, positions) of rows."""
    seeds = [noise.seed_stream(seed) for seed in range(rows)]
    return torch.tensor(seeds, dtype=torch.int64), torch.arange(rows, dtype=torch.int64) * 37


def check_draws(logits: torch.Tensor, temperature: torch.Tensor) -> None:
    """Against the reference on the host, whose logarithms are an ulp off: no near ties, please."""
    streams, positions = noise_of(len(logits))
    found = kernels.draw(*(value.to(DEVICE) for value in (logits, temperature, streams, positions)))
    expected = sampling.draw(logits.clone(), temperature, streams, positions)
    assert found.tolist() == expected.tolist()


@pytest.fixture(params=[1, 64], ids=["whole rows", "many parts"])
def num_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows in one part, whose later blocks are held against the best of the former, and in parts."""
    monkeypatch.setattr(kernels, "_PROGRAMS", request.param)
    return int(request.param)


#: What a logit can be without being NaN.
KINDS = ("flat", "peaked", "equal", "two values", "rising", "falling", "huge", "lowest", "masked", "forbidden", "few")


def row_of(kind: str, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(vocab, generator=generator) * 3
    lowest = torch.finfo(torch.float32).min
    mask = torch.rand(vocab, generator=generator) < 0.98
    match kind:
        case "peaked":
            return -2 * (torch.randperm(vocab, generator=generator) + 1.0).log()
        case "equal" | "forbidden":
            return torch.full((vocab,), 0.0 if kind == "equal" else -torch.inf)
        case "two values":
            return torch.where(x > 0, 7.0, -7.0)
        case "rising" | "falling":
            return torch.arange(vocab) * (0.03 if kind == "rising" else -0.03)
        case "huge":
            return x * 1e37
        case "lowest":
            return torch.full((vocab,), lowest).masked_fill(mask, -torch.inf)
        case "masked" | "few":
            return x.masked_fill(mask, -torch.inf if kind == "masked" else lowest)
    return x


@pytest.mark.parametrize(
    ("num_programs", "dtype"),
    [
        pytest.param(1, torch.float32, id="whole rows, float32"),
        pytest.param(64, torch.bfloat16, id="many parts, bfloat16"),
        pytest.param(1, torch.bfloat16, id="whole rows, bfloat16", marks=pytest.mark.slow),
        pytest.param(64, torch.float32, id="many parts, float32", marks=pytest.mark.slow),
    ],
    indirect=["num_programs"],
)
def test_draws_from_rows_of_every_kind(num_programs: int, dtype: torch.dtype) -> None:
    rows = [(kind, temperature) for kind in KINDS for temperature in (0.0, 0.7)]
    if num_programs == 1 and dtype == torch.float32:
        # all but the first say nothing of what wins, so that every token is scored
        rows = [(kind, 1e-6) for kind in KINDS] + [
            (kind, temperature) for kind in KINDS[::4] for temperature in (1e-39, torch.inf)
        ]
    logits = torch.stack([row_of(kind, 1100).to(dtype) for kind, _ in rows])
    check_draws(logits, torch.tensor([temperature for _, temperature in rows]))


@pytest.mark.usefixtures("num_programs")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_and_infinity_are_drawn_at_once(temperature: float) -> None:
    logits = torch.randn(8, 1300) * 3
    logits[0, 1299] = logits[1, 0] = torch.nan
    logits[2, [900, 901, 33, 1200]] = torch.nan
    logits[3, [700, 40]] = torch.inf
    logits[4, 40], logits[4, [650, 1250]] = torch.inf, torch.nan
    logits[5] = torch.nan
    logits[6] = torch.inf
    logits[7], logits[7, 1100] = -torch.inf, torch.nan
    check_draws(logits, torch.full((len(logits),), temperature))


@pytest.mark.usefixtures("num_programs")
def test_equal_scores_go_to_the_lowest_id_of_a_block() -> None:
    # the noise is lost in such scores, and what ties stands below each other, before and behind
    logits = torch.zeros(3, 2600)
    logits[0, [600, 601, 1500, 2590]] = 3e9
    logits[1, [900, 520, 2000]] = 3e9
    logits[2] = 3e9
    check_draws(logits, torch.tensor([1.0, 1e-3, 1.0]))
    tokens, _ = kernels.greedy(logits.to(DEVICE))
    assert tokens.tolist() == [600, 520, 0]


@triton.jit
def _held_against_itself(logits, temperatures, passed, scores, SIZE: tl.constexpr):
    token = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    key = tl.full([], 0x1234567887654321, tl.int64)
    value, temperature = tl.load(logits + token), tl.load(temperatures + token)
    noisy = temperature > 0.0
    exact = tl.div_rn(value, tl.where(noisy, temperature, 1.0)) + gumbel_noise(key, token)
    score = tl.where(noisy, exact, value)
    scale, base = bar_of(score, temperature, noisy)
    size = noise_size(key, 0, token)
    tl.store(passed + token, (over_bar(value, size, scale, base) < 0) == 0)
    # far above what the noise can give, nothing passes
    scale, base = bar_of(score + 1.0 + tl.abs(score) * 0.001 + 60.0, temperature, noisy)
    tl.store(scores + token, tl.where(over_bar(value, size, scale, base) < 0, float("nan"), score))


def test_no_token_is_passed_over_that_reaches_the_best() -> None:
    size = 1 << 17
    generator = torch.Generator().manual_seed(3)
    sign = torch.where(torch.rand(size, generator=generator) < 0.5, -1.0, 1.0)
    logits = sign * 10 ** (torch.rand(size, generator=generator) * 80 - 42)
    temperatures = 10 ** (torch.rand(size, generator=generator) * 80 - 42)
    usual = torch.arange(size) % 2 == 0
    logits[usual] = torch.randn(size // 2, generator=generator) * 10
    temperatures[usual] = torch.rand(size // 2, generator=generator) * 2
    temperatures[::7] = 0.0
    passed, scores = torch.zeros(size, dtype=torch.bool, device=DEVICE), torch.zeros(size, device=DEVICE)
    block = 1024 if DEVICE == "cuda" else size
    _held_against_itself[(size // block,)](logits.to(DEVICE), temperatures.to(DEVICE), passed, scores, SIZE=block)
    scores = scores.cpu()
    assert passed.all(), torch.stack([logits, temperatures, scores])[:, ~passed.cpu()]
    assert scores[usual].isnan().all(), "the bar holds nothing back"
