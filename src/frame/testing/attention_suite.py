"""The contract of attention backends: equal to the reference ops over random mixed batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, ContextShare

from .attention_case import AttentionCase, CaseRun, Row, check_padding, fill, kv_spec, make_case, make_memory
from .cross_case import check_across
from .plugin_suite import PluginSuite, reason_or_none

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "window": {"window": 21},
    "soft-cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "distances": {"distances": 12},
    "all": {"window": 21, "soft_cap": 3.0, "sinks": True, "alibi": True},
}
#: Whole contexts, and shares of one.
SHARES = (ContextShare(), ContextShare(2, 0), ContextShare(2, 1), ContextShare(4, 3))
BATCHES: Mapping[str, Sequence[Row]] = {
    "one decode": [(37, 1)],
    "decodes": [(40, 1), (3, 1), (16, 1), (0, 1), (129, 1)],
    "prefill": [(0, 70)],
    "prefills": [(0, 7), (0, 33), (0, 1), (0, 16)],
    "chunk": [(45, 20)],
    "mixed": [(0, 1), (5, 1), (16, 1), (0, 7), (9, 5), (64, 1), (30, 2), (0, 33)],
}
MIXED = BATCHES["mixed"]
#: Far from anything that attention of normal numbers gives, so that reading it shows.
STALE = 300.0
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_SIZES = [(64, 16, torch.float32), (64, 16, torch.bfloat16), (128, 16, torch.bfloat16), (128, 16, torch.float16)]


class AttentionBackendSuite(PluginSuite):
    """The contract of `frame.interfaces.AttentionBackend`.

        class TestMine(AttentionBackendSuite):
            plugin = "mine"              # or target = "package.module:Class"
            device_type = "cpu"          # left out: the first of cuda and cpu that it supports

    What `supports` refuses is skipped, with its reason. Override `tolerance` for a backend that rounds more.
    """

    kind = "attention"
    spec_type: ClassVar[type] = AttentionSpec
    device_type: ClassVar[str] = ""

    def tolerance(self, spec: AttentionSpec) -> float:
        """The largest absolute and relative difference from the reference that passes."""
        return max(_TOLERANCE[spec.dtype], _TOLERANCE.get(spec.kv_dtype, 0.1))

    def backend_class(self) -> type[AttentionBackend]:
        """The class under test."""
        found: type[AttentionBackend] = self.found()
        return found

    def devices(self) -> list[str]:
        """The device types of this machine, the preferred one first."""
        if self.device_type:
            return [self.device_type]
        return ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]

    def spec(self, **changes: Any) -> AttentionSpec:
        """A common layer that the backend supports, with some fields changed; skips when that is not supported."""
        kind, refused = self.backend_class(), []
        for device, (dim, block, dtype) in itertools.product(self.devices(), _SIZES):
            base = _fitting(kind, AttentionSpec(4, 2, dim, dim**-0.5, dtype, dtype, block, device))
            reason = kind.supports(base)
            if reason is None:
                if "dtype" in changes:
                    changes = {"kv_dtype": changes["dtype"], **changes}
                wanted = _fitting(kind, replace(base, **changes))
                reason = kind.supports(wanted)
                if reason is not None:
                    pytest.skip(f"not supported: {reason}")
                return wanted
            refused.append(f"{device}, {dtype}, head size {dim}: {reason}")
        pytest.skip("; ".join(refused))

    def backend(self, spec: AttentionSpec) -> AttentionBackend:
        """A new backend for layers of `spec`. Platforms with ops of their own may override this."""
        made: AttentionBackend = self.make(spec=spec)
        return made

    def run(self, case: AttentionCase, *, stale: float = STALE, **host: Any) -> CaseRun:
        """History and step on a new backend; the output is checked against the reference."""
        run = CaseRun(self.backend(case.spec), case, stale=stale)
        with torch.inference_mode():
            run.fill_history()
            (out,) = run.step(**host)
        self.check(out, case, host.get("padding_tokens", 0))
        return run

    def check(self, out: torch.Tensor, case: AttentionCase, padding_tokens: int = 0) -> None:
        """Shape, dtype, finite everywhere, and equal to the reference for real tokens."""
        want = case.expected()
        real = want.shape[0]
        shape = [real + padding_tokens, *want.shape[1:]]
        assert list(out.shape) == shape, f"the output is {list(out.shape)}, expected [T, H, D] {shape}"
        assert out.dtype == case.spec.dtype, f"the output is {out.dtype}, the layer computes in {case.spec.dtype}"
        assert torch.isfinite(out).all(), "the output holds NaN or infinity (rows of padding included)"
        bound = self.tolerance(case.spec)
        torch.testing.assert_close(out[:real].cpu().float(), want.float(), atol=bound, rtol=bound)

    def test_supports_gives_reasons_and_never_raises(self) -> None:
        kind, base = self.backend_class(), self._any_spec()
        odd: list[dict[str, Any]] = [
            {"head_dim": 0}, {"head_dim": 7}, {"head_dim": 4096}, {"num_heads": 6, "num_kv_heads": 4},
            {"num_heads": 0, "num_kv_heads": 0}, {"block_size": 0}, {"block_size": 3}, {"block_size": 4096},
            {"dtype": torch.int8}, {"kv_dtype": torch.float8_e4m3fn}, {"kv_dtype": torch.int8},
            {"dtype": torch.complex64}, {"device_type": "no-such-device"}, {"kind": "encoder_only"}, {"kind": "cross"},
            {"kind": "encoder"}, {"distances": 4},
            {"window": 1}, {"window": 10**9}, {"soft_cap": 1e-3}, {"deterministic": True},
        ]  # fmt: skip
        for changes in odd:
            reason_or_none(kind.supports(replace(base, **changes)), f"supports({changes})")
            preference = kind.preference(replace(base, **changes))
            assert preference is None or isinstance(preference, int), f"preference gave {preference!r}"
        for changes in ({"num_heads": 6, "num_kv_heads": 4}, {"head_dim": 0}, {"dtype": torch.int8}):
            assert kind.supports(replace(base, **changes)), f"supports must refuse a layer with {changes}"

    def test_it_supports_a_common_layer(self) -> None:
        self.spec()

    def test_blocks_of_each_multiple_are_served(self) -> None:
        spec, kind = self.spec(), self.backend_class()
        multiple = kind.block_multiple(replace(spec, block_size=0))
        assert isinstance(multiple, int), f"block_multiple must be an int, is {multiple!r}"
        assert multiple > 0, f"block_multiple must be above 0, is {multiple}"
        for factor in (1, 2, 3, 4):
            longer = replace(spec, block_size=factor * multiple)
            assert kind.block_multiple(longer) == multiple, "block_multiple must not follow spec.block_size"
            reason = kind.supports(longer)
            assert reason is None, f"block_multiple gives {multiple}, and blocks of {longer.block_size}: {reason}"

    @pytest.mark.parametrize("block_size", [1, 4, 16, 32])
    def test_a_block_is_one_piece_of_memory(self, block_size: int) -> None:
        spec = self.spec(block_size=block_size)
        kind = self.backend_class()
        block, size = kind.kv_format(spec), kv_spec(spec).block_bytes(spec.block_size)
        assert block.num_bytes == size, f"kv_format {block} fills {block.num_bytes} of the {size} bytes of a block"
        if block.head_axis is not None:
            assert block.shape[block.head_axis] == spec.num_kv_heads, f"kv_format {block} has no KV heads on head_axis"
        make_memory(spec, 7).layer_block("0", kind, spec)

    @pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_a_step_equals_the_reference(self, features: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self.run(make_case(self.spec(**features), rows))

    @pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1), (1, 1), (5, 5)], ids=lambda heads: f"{heads}")
    def test_heads_share_keys_and_values(self, heads: tuple[int, int]) -> None:
        self.run(make_case(self.spec(num_heads=heads[0], num_kv_heads=heads[1]), MIXED))

    @pytest.mark.parametrize("block_size", [1, 4, 8, 32, 64])
    def test_blocks_of_other_sizes(self, block_size: int) -> None:
        self.run(make_case(self.spec(block_size=block_size, window=9), MIXED))
        self.run(make_case(self.spec(block_size=block_size), MIXED))

    @pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 128, 256])
    def test_heads_of_other_sizes(self, head_dim: int) -> None:
        self.run(make_case(self.spec(head_dim=head_dim, scale=head_dim**-0.5), MIXED))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_dtypes(self, dtype: torch.dtype) -> None:
        self.run(make_case(self.spec(dtype=dtype), MIXED))

    def test_a_cache_of_another_dtype(self) -> None:
        self.run(make_case(self.spec(dtype=torch.float32, kv_dtype=torch.bfloat16), MIXED))

    @pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    def test_a_cache_of_8_bit_floats(self, kv_dtype: torch.dtype) -> None:
        case = make_case(self.spec(kv_dtype=kv_dtype, dtype=torch.float32), MIXED)
        self.run(replace(case, layer=replace(case.layer, key_scale=0.02, value_scale=0.5)))

    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_padding_rows_and_tokens(self, features: Mapping[str, Any]) -> None:
        self.run(make_case(self.spec(**features), MIXED), padding_rows=3, padding_tokens=5)

    @pytest.mark.parametrize("padding_tokens", [0, 1, 5])
    @pytest.mark.parametrize("padding_rows", [0, 1, 3])
    @pytest.mark.parametrize("batch", ["mixed", "decodes"])
    def test_padding_reaches_no_real_token(self, batch: str, padding_rows: int, padding_tokens: int) -> None:
        """Padding rows start behind the last token, which is past the end of the query where no token is padding."""
        rows = MIXED if batch == "mixed" else BATCHES["decodes"]
        self.run(make_case(self.spec(), rows), padding_rows=padding_rows, padding_tokens=padding_tokens)

    def test_host_lengths_may_be_an_upper_bound(self) -> None:
        self.run(make_case(self.spec(), BATCHES["decodes"]), bound=3)

    @pytest.mark.parametrize("features", ["plain", "window", "all"])
    def test_captured_decodes_serve_shorter_rows_and_padding(self, features: str) -> None:
        """A step captured as a CUDA graph serves later steps of other lengths: the plan must not depend on them."""
        case = make_case(self.spec(**FEATURES[features]), [(40, 1), (3, 1), (16, 1), (0, 1)])
        if self.backend(case.spec).needs_python:
            pytest.skip("needs_python: no step is captured")
        self.run(case, captured=True, padding_rows=2, padding_tokens=2, bound=900, stale=float("nan"))

    @pytest.mark.parametrize("features", ["plain", "window", "all"])
    @pytest.mark.parametrize("rows", [1, 3])
    def test_a_step_of_padding_with_more_tokens_than_rows_stores_nothing(self, features: str, rows: int) -> None:
        """A step of padding whose host-side lengths say one token a row, as piecewise graphs are captured with."""
        case = make_case(self.spec(**FEATURES[features]), [(900, 0)] * rows)
        backend = self.backend(case.spec)
        if backend.needs_python:
            pytest.skip("needs_python: no step is captured")
        check_padding(CaseRun(backend, case, stale=float("nan")))

    def test_nan_left_by_another_request_does_not_spread(self) -> None:
        self.run(make_case(self.spec(), MIXED), stale=float("nan"), padding_rows=2, padding_tokens=3)
        self.run(make_case(self.spec(window=9), MIXED), stale=float("nan"))

    def test_nothing_is_written_outside_the_tokens_slots(self) -> None:
        case = make_case(self.spec(), MIXED)
        run = self.run(case, padding_rows=1, padding_tokens=4)
        mine = {int(block) for table in case.tables for block in table}
        untouched = make_memory(case.spec, 2)
        fill(untouched, case.spec, STALE)
        want = untouched.layer_bytes()["0"][0]
        for block in set(range(case.num_blocks)) - mine:
            assert torch.equal(run.memory.layer_bytes()["0"][block], want), f"block {block} belongs to no row"

    def test_one_plan_serves_every_layer_of_the_group(self) -> None:
        case = make_case(self.spec(), MIXED)
        run = CaseRun(self.backend(case.spec), case, num_layers=3, stale=STALE)
        with torch.inference_mode():
            run.fill_history()
            for out in run.step():
                self.check(out, case)

    def test_one_backend_serves_many_steps(self) -> None:
        """Token by token, with batches that grow and shrink."""
        spec = self.spec()
        whole = make_case(spec, [(0, 24), (0, 11), (0, 30)])
        want = whole.expected().split([24, 11, 30])
        run = CaseRun(self.backend(spec), whole, stale=STALE)
        for start, end in ((0, 9), (9, 10), (10, 11), (11, 24), (24, 25), (25, 30)):
            rows = [row for row, (_, count) in enumerate(whole.rows) if end <= count]
            part = whole.of_rows(rows)
            spans = [(start, end)] * len(rows)
            with torch.inference_mode():
                plan = run.backend.plan(part.batch(spans))
                out: Any = run.backend.forward(whole.layer, *part.inputs(spans), run.caches[0], plan)
            expected = torch.cat([want[row][start:end] for row in rows])
            bound = self.tolerance(spec)
            torch.testing.assert_close(out.cpu().float(), expected.float(), atol=bound, rtol=bound)

    def test_deterministic_bits_do_not_depend_on_the_batch(self) -> None:
        spec = self.spec(deterministic=True)
        case = make_case(spec, MIXED)
        with torch.inference_mode():
            run = CaseRun(self.backend(spec), case, stale=STALE)
            run.fill_history()
            together = run.step()[0].split([count for _, count in case.rows])
            for row, want in enumerate(together):
                single = CaseRun(self.backend(spec), case.of_rows([row]), stale=STALE)
                single.fill_history()
                assert torch.equal(single.step()[0], want), f"row {case.rows[row]} has other bits alone"

    @pytest.mark.parametrize("batch", ["mixed", "decodes", "prefills"])
    @pytest.mark.parametrize("features", [*FEATURES, "deterministic"])
    @pytest.mark.parametrize("share", SHARES, ids=lambda share: f"{share.rank} of {share.ranks}")
    def test_log_sum_exps_over_what_the_cache_holds(self, share: ContextShare, features: str, batch: str) -> None:
        """Also of queries that see nothing there, and with padding."""
        changes = dict(FEATURES.get(features, {"deterministic": True}))
        if "window" in changes and share.ranks > 1:
            changes["window"] = 24
        spec = self.spec(returns_lse=True, context=share, **changes)
        case = make_case(spec, BATCHES[batch])
        run = CaseRun(self.backend(spec), case, stale=float("nan"))
        with torch.inference_mode():
            run.fill_history()
            ((out, lse),) = run.step(padding_tokens=3, padding_rows=2)
        want, want_lse = case.expected_parts()
        assert list(lse.shape) == list(out.shape[:2]) == [len(want) + 3, spec.num_heads]
        assert lse.dtype == torch.float32
        assert torch.isfinite(out).all(), "the output holds NaN or infinity (rows of padding included)"
        bound = self.tolerance(spec)
        torch.testing.assert_close(out[: len(want)].cpu().float(), want.float(), atol=bound, rtol=bound)
        torch.testing.assert_close(lse[: len(want)].cpu(), want_lse.float(), atol=bound, rtol=bound)
        assert not lse.isnan().any(), "the log-sum-exps of padding are NaN"

    def test_captured_decodes_over_a_share_serve_shorter_rows(self) -> None:
        spec = self.spec(returns_lse=True, context=ContextShare(2, 1))
        case = make_case(spec, [(40, 1), (3, 1), (16, 1), (0, 1)])
        backend = self.backend(spec)
        if backend.needs_python:
            pytest.skip("needs_python: no step is captured")
        run = CaseRun(backend, case, stale=float("nan"))
        with torch.inference_mode():
            run.fill_history()
            ((out, lse),) = run.step(captured=True, padding_rows=2, padding_tokens=2, bound=900)
        want, want_lse = case.expected_parts()
        bound = self.tolerance(spec)
        torch.testing.assert_close(out[:4].cpu().float(), want.float(), atol=bound, rtol=bound)
        torch.testing.assert_close(lse[:4].cpu(), want_lse.float(), atol=bound, rtol=bound)

    def test_rows_read_all_that_an_encoder_gave(self) -> None:
        """Rows of one and of several tokens, some of which begin: their encoder tokens are stored before that."""
        check_across(self.backend(spec := self.spec(kind="cross")), spec, self.tolerance(spec))

    def _any_spec(self) -> AttentionSpec:
        dtype = torch.float32
        return AttentionSpec(4, 2, 64, 0.125, dtype, dtype, 16, self.devices()[0])


def _fitting(kind: type[AttentionBackend], spec: AttentionSpec) -> AttentionSpec:
    """`spec` with blocks of a size that the backend accepts."""
    return replace(spec, block_size=math.lcm(spec.block_size, kind.block_multiple(spec)))
