"""The Hopper kernel for prompts against the reference: on a Hopper GPU only, as Gluon ignores the interpreter.

Its plain twin is the kernel for any batch, which tests/gpu/test_attention.py runs under the interpreter.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.ops import Ops
from frame.interfaces import BackendSetup
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.attention.triton_options import TritonOptions
from tests.plugins.attention.batches import check, make_case, run, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon ignores the interpreter"),
]

PLAIN = TritonOptions(persistent_prefill=False)
CLOSE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
LONG = [(0, 1), (300, 1), (0, 130), (77, 200), (0, 64), (128, 128), (1000, 65)]
ROWS = {"mixed": LONG, "prompts": LONG[2:], "one": [(5, 700)], "tile": [(0, 128)]}
FEATURES = {
    "window of less than a tile": {"window": 40},
    "window of a tile": {"window": 128},
    "window of some tiles": {"window": 300},
    "window longer than all": {"window": 4096},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 200, "soft_cap": 3.0, "sinks": True},
}
#: (head size, block size, dtype)
SIZES = [
    (128, 16, torch.bfloat16),
    (64, 16, torch.float16),
    (128, 64, torch.float16),
    (64, 256, torch.bfloat16),
    (256, 16, torch.bfloat16),
    (256, 128, torch.float16),
    (96, 16, torch.bfloat16),
    (80, 32, torch.float16),
]


class HopperAttention(TritonAttention):
    """The backend with one program for each block of queries."""

    settings = PLAIN

    def __init__(self, setup: BackendSetup, options: TritonOptions | None = None) -> None:
        super().__init__(setup, options or self.settings)


class PersistentAttention(HopperAttention):
    settings = TritonOptions(persistent_prefill=True)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper")


def layer_spec(**changes) -> AttentionSpec:
    common = {"dtype": torch.bfloat16, "head_dim": 128, "block_size": 16, "num_heads": 8, "num_kv_heads": 2}
    return spec_of(device_type="cuda", **{**common, "scale": 0.1, **changes})


def check_case(kind: type[TritonAttention], spec: AttentionSpec, rows: list, **padding: int) -> None:
    case = make_case(kind, spec, rows, page_slack=spec.head_dim * 2, **padding)
    assert kind(BackendSetup(spec, Ops())).plan(case.batch).mixed is None, "the kernel for any batch was chosen"
    check(kind, case, CLOSE[spec.dtype], CLOSE[spec.dtype])


@pytest.mark.parametrize("kind", [HopperAttention, PersistentAttention], ids=["plain", "persistent"])
@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), SIZES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_sizes_equal_the_reference(
    rows: list, head_dim: int, block_size: int, dtype: torch.dtype, kind: type[TritonAttention]
) -> None:
    check_case(kind, layer_spec(dtype=dtype, head_dim=head_dim, block_size=block_size), rows)


@pytest.mark.parametrize("kind", [HopperAttention, PersistentAttention], ids=["plain", "persistent"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("rows", [LONG, ROWS["one"]], ids=["mixed", "one"])
def test_features_equal_the_reference(rows: list, features: dict, head_dim: int, kind: type[TritonAttention]) -> None:
    """Blocks before a window name any block: what lies there must not be read."""
    check_case(kind, layer_spec(head_dim=head_dim, **features), rows)


@pytest.mark.parametrize("kind", [HopperAttention, PersistentAttention], ids=["plain", "persistent"])
def test_padding_is_skipped_and_finite(kind: type[TritonAttention]) -> None:
    check_case(kind, layer_spec(), LONG, padding_tokens=70, padding_rows=3)


def test_many_turns_of_a_persistent_program() -> None:
    """More blocks than multiprocessors, of rows that differ much in length."""
    rows = [(0, 40 + 97 * row % 900) for row in range(40)]
    check_case(PersistentAttention, layer_spec(num_heads=16, num_kv_heads=4), rows)


def test_the_same_bits_from_programs_of_one_block_and_of_many() -> None:
    case = make_case(HopperAttention, layer_spec(), LONG[2:])
    assert torch.equal(run(HopperAttention, case)[0], run(PersistentAttention, case)[0])


def test_short_prompts_and_what_it_cannot_serve_stay_with_triton() -> None:
    def uses_hopper(options: TritonOptions, **changes) -> bool:
        spec = layer_spec(**changes)
        batch = make_case(TritonAttention, spec, LONG).batch
        return TritonAttention(BackendSetup(spec, Ops()), options).plan(batch).mixed is None

    served = partial(uses_hopper, TritonOptions())
    for changes in ({}, {"window": 8}, {"soft_cap": 2.0}, {"sinks": True}, {"head_dim": 256}, {"head_dim": 96}):
        assert served(**changes)
        assert not uses_hopper(TritonOptions(hopper_prefill=False), **changes)
    for changes in ({"alibi": True}, {"head_dim": 72}, {"dtype": torch.float32}, {"block_size": 8}):
        assert not served(**changes)
    short = make_case(TritonAttention, layer_spec(), [(0, 20), (0, 3)]).batch
    assert TritonAttention(BackendSetup(layer_spec(), Ops())).plan(short).mixed is not None
