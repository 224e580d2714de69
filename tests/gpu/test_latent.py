"""The Triton backend of latent attention against the reference: on a GPU, and under the interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from frame.interfaces import BackendSetup
from frame.kernels import latent_decode as kernels
from frame.kernels.latent_decode import LatentLaunch
from frame.ops import Ops
from frame.plugins.attention import triton_latent
from frame.plugins.attention.triton_latent import TritonLatent
from frame.testing.latent_case import LatentCase, latent_spec, make_latent_case

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
#: By type, of the largest number: the reference multiplies in float32.
CLOSE = {torch.float32: 1e-4 if INTERPRETED else 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
MIXED = [(0, 1), (5, 1), (0, 7), (20, 5), (3, 1), (0, 33), (50, 40), (30, 2)]
DECODES = [(0, 1), (90, 1), (3, 1), (31, 1)]
#: DeepSeek V2-Lite and V3 on eight ranks; V3; GLM-4.7-Flash; MiniCPM3.
LAYERS: dict[str, dict[str, Any]] = {
    "16 heads": {"num_heads": 16, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "rank": 512},
    "128 heads": {"num_heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "rank": 512},
    "20 heads": {"num_heads": 20, "nope_dim": 192, "rope_dim": 64, "value_dim": 256, "rank": 512},
    "40 heads": {"num_heads": 40, "nope_dim": 64, "rope_dim": 32, "value_dim": 64, "rank": 256},
}


def check(case: LatentCase, **how: Any) -> None:
    expected, out = case.expected().float(), case.run(TritonLatent, **how).float()
    assert torch.isfinite(out).all()
    gap = (out[: len(expected)] - expected).abs().max() / expected.abs().max()
    assert gap < CLOSE[case.layer.spec.dtype], f"{gap:.2g} of the largest"


def small(**changes: Any) -> Any:
    return latent_spec(device_type=DEVICE, **changes)


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("block_size", [3, 16])
def test_any_step_equals_the_reference(rows: list, block_size: int) -> None:
    check(make_latent_case(small(block_size=block_size), rows), stale=float("nan"))


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
def test_half_precision(rows: list) -> None:
    check(make_latent_case(small(dtype=HALF), rows), stale=7.0)


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_latents_whose_first_part_is_kept_in_8_bits(rows: list, dtype: torch.dtype) -> None:
    case = make_latent_case(small(dtype=dtype, kv_dtype=torch.float8_e4m3fn), rows)
    case.latents[0][0, 0] = 1e4  # beyond the type's range: its largest number is kept
    check(case, padding_rows=2, padding_tokens=3 if rows is MIXED else 0)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, id=f"{name}, {kind}", marks=[] if name == usual else pytest.mark.slow)
        for kind, rows, usual in (
            ("decode", [(40, 1), (7, 1)], "16 heads"),
            ("prompts", [(20, 1), (0, 150), (60, 3), (50, 180)], ""),
        )
        for name in LAYERS
    ],
)
def test_layers_of_models(name: str, rows: list) -> None:
    check(make_latent_case(small(dtype=HALF, **LAYERS[name]), rows))


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 7, 8])
def test_parts_of_rows_are_joined(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows have fewer parts than the launch, and none of length 0."""
    given = kernels.launch_for
    monkeypatch.setattr(kernels, "launch_for", lambda heads, dtype, _=1: given(heads, dtype, splits))
    check(make_latent_case(small(), [(0, 1), (300, 1), (15, 1), (129, 1), (20, 3)]), padding_rows=2)


@pytest.mark.parametrize(("splits", "rank"), [(2, 512), (5, 512), (17, 288), (128, 64)])
def test_parts_are_weighed_by_their_sizes(splits: int, rank: int) -> None:
    torch.manual_seed(splits)
    parts = torch.randn(3, 2, splits, rank, device=DEVICE)
    lse = 4 * torch.randn(3, 2, splits, device=DEVICE)
    lse[0, 0, 1:] = lse[1] = float("-inf")
    parts[lse == float("-inf")] = float("nan")  # nothing reads what has no weight
    out = torch.full((3, 2, rank), 7.0, device=DEVICE)
    sizes = kernels.latents_of(out.new_empty(1, 16, rank), out.new_empty(1, 16, 64))
    kernels.join_parts(out, parts, lse, sizes)
    weights = (lse * 0.6931471805599453).softmax(-1).nan_to_num()
    torch.testing.assert_close(out, (weights[..., None] * parts.nan_to_num()).sum(2))


@triton.jit
def _even_parts(out, seq_len, splits):
    part = tl.arange(0, 64)
    low, high = kernels.part_of_row(seq_len, part, splits, 64)
    tl.store(out + part, low)
    tl.store(out + 64 + part, high)


@pytest.mark.parametrize(("tiles", "splits"), [(0, 3), (1, 4), (5, 7), (64, 33), (512, 17)])
def test_even_parts_differ_by_a_tile_and_meet(tiles: int, splits: int) -> None:
    """The last one has the newest token, which it stores."""

    length = max(0, tiles * 64 - 9)
    found = torch.zeros(2, 64, dtype=torch.int32, device=DEVICE)
    _even_parts[(1,)](found, length, splits)
    low, high = found[:, :splits].cpu().tolist()
    assert low == [0, *high[:-1]]
    assert high[-1] == length
    counts = [-(-(last - first) // 64) for first, last in zip(low, high, strict=True)]
    assert sum(counts) == tiles
    assert max(counts) - min(counts) <= 1


def test_the_host_splits_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonLatent(BackendSetup(small(num_heads=16), Ops()))
    monkeypatch.setattr(backend, "_multiprocessors", 132)
    lengths = torch.full((64,), 8192).numpy()
    assert backend._launch(64, lengths).splits == 4
    assert backend._launch(8, 4 * lengths).splits == 32
    assert backend._launch(1, lengths // 64).splits == 1


@pytest.mark.parametrize("workspace", [pytest.param(16, marks=pytest.mark.slow), 100])
def test_pieces_of_the_context_are_merged(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = TritonLatent.__init__

    def with_less(self: Any, *args: Any) -> None:
        made(self, *args)
        self._workspace = workspace

    monkeypatch.setattr(triton_latent.TritonLatent, "__init__", with_less)
    check(make_latent_case(small(), [(5, 1), (90, 40), (7, 5), (0, 33), (33, 34)]))


@pytest.mark.skipif(INTERPRETED, reason="nothing is waited for under the interpreter")
def test_planning_waits_for_no_step() -> None:
    class Planned(TritonLatent):
        def plan(self, batch: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return super().plan(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    assert torch.isfinite(make_latent_case(small(), MIXED).run(Planned)).all()


def test_padding_stores_nothing() -> None:
    """A captured step's host lengths are of other rows, and padding has neither tokens nor slots."""
    check(make_latent_case(small(), DECODES), padding_rows=3)
    check(make_latent_case(small(), [(5, 1), (90, 40)]), padding_rows=2, padding_tokens=5)
    check(make_latent_case(small(), DECODES), captured=True, bound=400)


def test_nothing_is_filled_where_rows_cover_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unfilled(TritonLatent):
        def forward(self, *given: Any) -> torch.Tensor:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "new_zeros", None)
                return super().forward(*given)

    case = make_latent_case(small(), [(5, 1), (90, 4), (0, 40)])
    out = case.run(TritonLatent, padding_tokens=2)
    assert torch.equal(out[45:], torch.zeros_like(out[45:]))
    assert torch.equal(case.run(Unfilled), out[:45])


def test_rows_that_only_the_device_knows_the_length_of() -> None:
    """The host's lengths are bounds where drafts are in flight."""
    check(make_latent_case(small(), [(40, 1), (60, 4), (20, 3)]), bound=5)


@pytest.mark.skipif(INTERPRETED, reason="nothing is recorded under the interpreter")
def test_a_recorded_step_serves_other_rows() -> None:
    spec = small(dtype=HALF, **LAYERS["16 heads"])
    launch = LatentLaunch(16, 32, 8, 4, 2)
    cache = torch.randn(200, 16, spec.width, device=DEVICE, dtype=HALF)
    lengths = torch.tensor([901, 301, 32], dtype=torch.int32, device=DEVICE)
    table = torch.arange(180, dtype=torch.int32, device=DEVICE).view(3, 60)
    query = torch.randn(3, 16, spec.width, device=DEVICE, dtype=HALF)
    how: dict[str, Any] = {"rank": spec.rank, "scale": spec.scale, "launch": launch}
    rows, latent = torch.arange(3, dtype=torch.int32, device=DEVICE), query[:, 0]
    slots = torch.full((3,), -1, device=DEVICE)

    def step() -> torch.Tensor:
        return kernels.latent_decode(query, latent, cache, slots, lengths, rows, table, **how)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lengths.copy_(torch.tensor([17, 0, 640], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, step())
