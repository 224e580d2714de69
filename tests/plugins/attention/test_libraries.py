"""Backends around libraries: what they refuse and why, what is chosen, and how prompts are grouped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.interfaces.kv import FullKV
from frame.core.ops import Ops
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.attention_binding import choose_backends
from frame.interfaces import BackendSetup, why_not_served
from frame.plugins.attention.cudnn import MAX_ROWS, CudnnAttention, padded
from frame.plugins.attention.flash import FlashAttention
from tests.plugins.attention.batches import SPEC, check, make_case
from tests.plugins.attention.stand_ins import CudnnOnCpu, FlashThreeOnCpu, StandInFour, StandInThree, StandInTwo

HALF = replace(SPEC, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=64, block_size=16)


class Absent(StandInThree):
    def load(self):
        raise ModuleNotFoundError("No module named 'flash_attn_interface'", name="flash_attn_interface")


class Broken(StandInTwo):
    def load(self):
        raise OSError("undefined symbol: _ZN3c10")


class Elsewhere(StandInThree):
    def capability(self):
        return 8, 0


def flash(*libraries):
    return type("Flash", (FlashThreeOnCpu,), {"libraries": libraries})


def test_each_version_gives_its_reasons_where_none_can() -> None:
    spec = replace(HALF, alibi=True)
    assert str(flash(Absent(), Broken()).supports(spec)).split("; ") == [
        "FlashAttention 3: ALiBi not supported, package 'flash_attn_interface' is not installed",
        "FlashAttention 2: flash_attn cannot be imported (OSError)",
    ]
    assert "FlashAttention 3: this GPU's compute capability not supported" in str(flash(Elsewhere()).supports(HALF))


def test_four_refuses_windows() -> None:
    """It multiplies what lies before them, which may be no number, by zero."""
    assert flash(StandInFour()).supports(HALF) is None
    refused = str(flash(StandInFour()).supports(replace(HALF, window=9)))
    assert refused.startswith("FlashAttention 4: sliding windows not supported")
    assert flash(StandInFour(), StandInThree()).supports(replace(HALF, window=9)) is None


def test_faults_of_the_layer_come_first_and_do_not_hide_each_other() -> None:
    spec = replace(HALF, head_dim=60, sinks=True, deterministic=True, kv_dtype=torch.float16)
    assert str(flash(Absent()).supports(spec)).split("; ") == [
        "head size 60 not supported (multiples of 8)",
        "KV-cache dtype float16 not supported beside dtype bfloat16",
        "attention sinks not supported",
        "deterministic steps not supported",
        "FlashAttention 3: package 'flash_attn_interface' is not installed",
    ]


def test_version_two_gets_large_pages_where_the_user_leaves_the_size_open(monkeypatch) -> None:
    spec = replace(HALF, block_size=0)
    assert flash(StandInTwo()).block_multiple(spec) == 256
    assert flash(StandInThree(), StandInTwo()).block_multiple(spec) == 1
    assert flash(StandInThree(), StandInTwo()).block_multiple(replace(spec, alibi=True)) == 256, (
        "the first has no ALiBi"
    )

    class Layer:
        name, backend_spec, of_encoder = "a", spec, False

        def planner(self, backend):
            return backend

        def kv_spec(self):
            return FullKV(num_kv_heads=2, head_dim=64, dtype="bfloat16")

    monkeypatch.setattr(FlashAttention, "libraries", (Absent(), StandInTwo()))
    monkeypatch.setattr(FlashAttention, "devices", ("cpu",))
    chosen = choose_backends({"a": Layer()}, from_flat({"attention_backend": "flash"}), Registry.load())
    assert chosen.layout.block_size == 256
    (planned,) = chosen.build(chosen.layout, Ops()).planned
    assert planned.backend.spec.block_size == 256
    with pytest.raises(PluginError, match="'flash' cannot be used here: its blocks hold a multiple of 256 tokens"):
        choose_backends({"a": Layer()}, from_flat({"attention_backend": "flash", "block_size": 16}), Registry.load())


def test_the_second_version_serves_what_the_first_cannot() -> None:
    kind = flash(StandInThree(), StandInTwo())
    for changes, name in (({}, "FlashAttention 3"), ({"alibi": True}, "FlashAttention 2")):
        spec = replace(HALF, **changes)
        assert kind.supports(spec) is None
        made = kind(BackendSetup(spec, Ops()))
        assert made._library.name == name
        check(kind, make_case(kind, spec, [(0, 1), (5, 3), (0, 33)]), 3e-2, 3e-2)


def test_cudnn_names_what_it_cannot_do() -> None:
    spec = replace(HALF, window=8, soft_cap=2.0, sinks=True, alibi=True, deterministic=True)
    assert str(CudnnAttention.supports(spec)).split("; ") == [
        "sliding windows not supported",
        "soft caps not supported",
        "attention sinks not supported",
        "ALiBi not supported",
        "deterministic steps not supported",
        "device 'cpu' not supported (there are: cuda)",
    ]


def test_our_own_kernels_stay_the_default() -> None:
    order = [provider.name for provider in Registry.load().providers("attention")]
    assert [name for name in order if name in ("triton", "flash", "cudnn", "torch")] == [
        "triton",
        "flash",
        "cudnn",
        "torch",
    ]
    chosen = Registry.load().select("attention", "auto", lambda kind: why_not_served(kind, SPEC, SPEC.block_size))
    assert chosen.name == "torch"
    assert FlashAttention.supports(HALF) is not None


def test_padding_is_less_than_an_eighth_and_leaves_few_lengths() -> None:
    lengths = range(128, 16385)
    assert all(length <= padded(length, 128) for length in lengths)
    assert all(padded(length, 128) - length < max(128, length / 8) for length in lengths)
    assert len({padded(length, 128) for length in lengths}) <= 48


@pytest.mark.parametrize(
    ("rows", "inner_rows", "groups"),
    [
        ([(3, 1), (9, 1)], 2, []),
        ([(3, 1), (0, 3)], 2, []),  # too short
        ([(0, 8), (0, 8), (0, 8)], 0, [(2, 8), (1, 8)]),
        ([(3, 1), (7, 20), (0, 8), (0, 7), (0, 40)], 2, [(2, 8), (1, 40)]),
        ([(0, 40), (7, 20)], 2, []),  # only rows at the end
        ([(0, 8)] * 37, 0, [(MAX_ROWS, 8), (MAX_ROWS, 8), (4, 8), (1, 8)]),
    ],
)
def test_which_rows_go_where(rows: list, inner_rows: int, groups: list) -> None:
    case = make_case(CudnnOnCpu, SPEC, rows, padding_tokens=3, padding_rows=2)
    plan = CudnnOnCpu(BackendSetup(SPEC, Ops())).plan(case.batch)
    assert [(group.count, group.length) for group in plan.prompts] == groups
    assert plan.num_rows == (inner_rows if groups else len(case.batch.host_query_lens))
    owned = [np.arange(group.start, group.start + group.count * group.length) if group.tokens is None
             else group.tokens[group.kept].numpy() for group in plan.prompts]  # fmt: skip
    if groups:
        wanted = np.arange(plan.num_tokens, sum(count for _, count in rows))
        assert np.array_equal(np.sort(np.concatenate(owned)), wanted)
    check(CudnnOnCpu, case)


def test_a_prompt_of_which_drafts_may_have_shortened_the_cache_is_not_new() -> None:
    case = make_case(CudnnOnCpu, SPEC, [(0, 8)])
    bound = replace(case.batch, host_seq_lens=case.batch.host_seq_lens + 2)
    assert not CudnnOnCpu(BackendSetup(SPEC, Ops())).plan(bound).prompts


@pytest.mark.parametrize("kind", [CudnnOnCpu, FlashThreeOnCpu])
def test_a_row_may_read_what_a_later_one_stores_in_the_same_step(kind) -> None:
    """Of two equal prompts the second has one token left to compute, and comes first in the batch."""
    spec = SPEC if kind is CudnnOnCpu else HALF
    size = spec.block_size
    case = make_case(kind, spec, [(2 * size, 1), (0, 2 * size)])
    case.batch.block_table[0, :2] = case.batch.block_table[1, :2]
    check(kind, case, 3e-2, 3e-2)
