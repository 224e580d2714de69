"""Thresholds and filtered draws against their references: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import random as noise, sampling
from frame.kernels import filters as kernels
from frame.kernels.sampling import draw

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

#: (top_k, top_p, min_p) of rows, one after the other
MIXES = [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (20, 1.0, 0.0), (3000, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (0, 0.999, 0.0),
    (0, 1e-7, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0), (50, 0.9, 0.0), (50, 0.95, 0.05), (0, 0.8, 0.02), (10**6, 0.5, 0.0),
]  # fmt: skip
ALL = tuple(range(len(MIXES)))
#: For long rows, of which the interpreter takes a third of a second each: what limits few, many and nearly all tokens.
SOME = (0, 1, 3, 6, 8, 11, 13) if INTERPRETED else ALL


def rows_of(scale: float, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(MIXES), vocab, generator=generator) * scale


def filters(names: str = "kpm") -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    k, p, m = zip(*MIXES, strict=True)
    return (
        torch.tensor(k, dtype=torch.int32) if "k" in names else None,
        torch.tensor(p) if "p" in names else None,
        torch.tensor(m) if "m" in names else None,
    )


def on_device(values: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    return [None if value is None else value.to(DEVICE) for value in values]


def check_threshold(scores: torch.Tensor, names: str = "kpm", mixes: tuple[int, ...] = ALL) -> None:
    scores = scores[list(mixes)]
    limits = tuple(None if value is None else value[list(mixes)] for value in filters(names))
    found = kernels.keep_threshold(scores.to(DEVICE), *on_device(limits)).cpu()
    expected = sampling.keep_threshold(scores.clone(), *limits)
    # every number up to a row's lowest score says the same: that all ids are kept
    lowest = scores.amin(-1)
    torch.testing.assert_close(found.maximum(lowest), expected.maximum(lowest), rtol=3e-7, atol=0)
    assert torch.equal(scores >= found[:, None], scores >= expected[:, None])


@pytest.mark.parametrize(
    "names", ["kp", "pm", "kpm", *(pytest.param(few, marks=pytest.mark.slow) for few in ("k", "p", "m", "km"))]
)
def test_every_mix_keeps_what_the_reference_keeps(names: str) -> None:
    check_threshold(rows_of(3, 500), names, mixes=(1, 2, 4, 8, 10, 11, 12))


@pytest.mark.parametrize(
    ("scale", "vocab"), [(3, 5), (0.1, 128), (8, 4097), pytest.param(1, 6000, marks=pytest.mark.slow)]
)
def test_thresholds_in_rows_of_any_shape(scale: float, vocab: int) -> None:
    check_threshold(rows_of(scale, vocab), mixes=ALL if vocab < 1000 else SOME)


def test_equal_values_are_kept_together() -> None:
    # more of them than are searched in registers
    check_threshold(torch.zeros(len(MIXES), 2300), mixes=(1, 3, 4, 10))
    check_threshold(-torch.zeros(len(MIXES), 300) * torch.tensor([1.0, -1.0, 1.0]).repeat(100), mixes=(2, 4, 10))
    check_threshold((rows_of(3, 2200) * 2).round() / 2, mixes=(2, 3, 6, 8, 11))


def test_forbidden_ids_are_never_kept() -> None:
    scores = rows_of(3, 3000)
    scores[:, 7:2990] = -torch.inf
    check_threshold(scores, mixes=SOME)


def test_thresholds_of_strided_rows() -> None:
    scores = rows_of(3, 1500)[:4]
    limits = on_device(tuple(None if value is None else value[8:12] for value in filters()))
    wide = torch.full((len(scores), 2000), 99.0)
    wide[:, :1500] = scores
    found = kernels.keep_threshold(wide.to(DEVICE)[:, :1500], *limits)
    assert torch.equal(found.cpu(), kernels.keep_threshold(scores.to(DEVICE), *limits).cpu())


@pytest.mark.parametrize(
    ("names", "vocab"),
    [
        ("kpm", 7),
        pytest.param("p", 3000, marks=pytest.mark.slow),
        ("kp", 3000),
        pytest.param("kpm", 5000, marks=pytest.mark.slow),
    ],
)
def test_filtered_draws_are_the_reference_id_for_id(names: str, vocab: int) -> None:
    copies = 3 if vocab < 100 and not INTERPRETED else 1
    logits = torch.cat([rows_of(3, vocab, seed) for seed in range(copies)])
    logits[5, 2] = logits[5, vocab - 1] = 60.0
    limits = [None if value is None else value.repeat(copies) for value in filters(names)]
    rows = len(logits)
    temperature = torch.tensor([0.0, 0.6, 1.0, 2.0, 1.3]).repeat(rows)[:rows]
    streams = torch.tensor([noise.seed_stream(seed) for seed in range(rows)], dtype=torch.int64)
    positions = torch.arange(rows, dtype=torch.int64) * 37
    given = on_device((logits, temperature, streams, positions, *limits))
    expected = sampling.draw(logits.clone(), temperature, streams, positions, *limits)
    assert draw(*given).tolist() == expected.tolist()  # type: ignore[arg-type]


def test_a_filtered_row_that_is_not_finite_shows_it() -> None:
    logits = rows_of(3, 2000)
    logits[1, 1500] = float("nan")
    logits[2] = float("-inf")
    logits[3, [40, 90]] = float("inf")
    temperature = torch.ones(len(logits))
    temperature[4:8] = 0
    logits[4, 77] = logits[4, 1999] = float("nan")
    logits[5, 3] = float("inf")
    logits[6] = float("-inf")
    streams = torch.arange(len(logits))
    tokens = draw(*on_device((logits, temperature, streams, streams, *filters("k"))))  # type: ignore[arg-type]
    assert tokens.tolist()[1:7] == [1500, 0, 40, 77, 3, 0]


@pytest.mark.parametrize("temperature", [pytest.param(1e-6, marks=pytest.mark.slow), 0.9])
def test_draws_among_ties_and_few_are_the_reference_id_for_id(temperature: float) -> None:
    rows = torch.zeros(5, 2300)
    rows[1, [601, 600, 1500, 2200]] = 3e9
    rows[2] = (rows_of(3, 2300)[2] > 0) * 14.0 - 7.0
    rows[3] = rows_of(3, 2300)[3].masked_fill(torch.arange(2300) % 97 != 5, -torch.inf)
    rows[4] = torch.arange(2300) * 0.01
    chosen = (2, 4, 8)
    logits = rows.repeat(len(chosen), 1)
    limits = [None if value is None else value[list(chosen)].repeat_interleave(len(rows)) for value in filters()]
    streams = torch.tensor([noise.seed_stream(seed) for seed in range(len(logits))], dtype=torch.int64)
    given = (logits, torch.full((len(logits),), temperature), streams, torch.arange(len(logits)) * 37, *limits)
    expected = sampling.draw(logits.clone(), *given[1:])  # type: ignore[arg-type]
    assert draw(*on_device(given)).tolist() == expected.tolist()  # type: ignore[arg-type]
