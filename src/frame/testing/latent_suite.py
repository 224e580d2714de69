"""The contracts of backends of latent attention and of its index: equal to their formulas over random batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.latent import IndexBackend, IndexSpec, LatentBackend, LatentSpec
from frame.core.interfaces.setup import BackendSetup
from frame.core.layers.latent import latent_kv
from frame.core.ops import Ops

from .attention_case import Row, make_case
from .attention_suite import BATCHES, MIXED
from .latent_case import LatentCase, latent_spec, make_latent_case
from .plugin_suite import PluginSuite, reason_or_none
from .reference_latent import ReferenceIndex

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class LatentBackendSuite(PluginSuite):
    """The contract of `frame.interfaces.LatentBackend`.

        class TestMine(LatentBackendSuite):
            plugin = "mine"              # or target = "package.module:Class"

    What `supports` refuses is skipped, with its reason.
    """

    kind = "attention"
    spec_type: ClassVar[type] = LatentSpec

    def spec(self, **changes: Any) -> LatentSpec:
        """A small layer that the backend supports, with some fields changed; skips when that is not supported."""
        kind: type[LatentBackend] = self.found()
        devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
        dtypes = (changes.pop("dtype"),) if "dtype" in changes else (torch.float32, torch.bfloat16, torch.float16)
        refused = []
        for device in devices:
            for dtype in dtypes:
                asked = latent_spec(device_type=device, dtype=dtype, **changes)
                multiple = kind.block_multiple(asked)
                asked = replace(asked, block_size=-(-asked.block_size // multiple) * multiple)
                if (reason := kind.supports(asked)) is None:
                    return asked
                refused.append(f"{device}, {dtype}: {reason}")
        pytest.skip("; ".join(refused))

    def run(self, case: LatentCase, **host: Any) -> Tensor:
        """What a new backend gives for the step; it is checked against the reference."""
        backend: LatentBackend = self.make(spec=case.layer.spec)
        with torch.inference_mode():
            out, want = case.run(backend, stale=float("nan"), **host), case.expected()
        shape = [len(want) + host.get("padding_tokens", 0), *want.shape[1:]]
        assert list(out.shape) == shape, f"the output is {list(out.shape)}, expected [T, H, value_dim] {shape}"
        assert out.dtype == want.dtype, f"the output is {out.dtype}, the layer computes in {want.dtype}"
        assert torch.isfinite(out).all(), "the output holds NaN or infinity (rows of padding included)"
        gap = float((out[: len(want)].float() - want.float()).abs().max() / want.float().abs().max())
        assert gap < _TOLERANCE[want.dtype], f"the output is {gap:.2g} of the largest number off"
        return out

    def test_supports_gives_reasons_and_never_raises(self) -> None:
        kind: type[LatentBackend] = self.found()
        base = latent_spec()
        odd: list[dict[str, Any]] = [
            {"rank": 0}, {"rank": 7}, {"rank": 4096}, {"num_heads": 0}, {"num_heads": 7}, {"rope_dim": 0},
            {"value_dim": 0}, {"block_size": 0}, {"block_size": 3}, {"dtype": torch.int8}, {"top_k": 5},
            {"kv_dtype": torch.float8_e4m3fn}, {"deterministic": True}, {"device_type": "no-such-device"},
        ]  # fmt: skip
        for changes in odd:
            reason_or_none(kind.supports(replace(base, **changes)), f"supports({changes})")
        for changes in ({"num_heads": 0}, {"rank": 0}, {"dtype": torch.int8}):
            assert kind.supports(replace(base, **changes)), f"supports must refuse a layer with {changes}"

    @pytest.mark.parametrize("changes", [{}, {"kv_dtype": torch.float8_e4m3fn}], ids=["plain", "e4m3"])
    def test_a_block_is_as_large_as_its_latents(self, changes: dict[str, Any]) -> None:
        spec = self.spec(**changes)
        block, size = self.found().kv_format(spec), latent_kv(spec).block_bytes(spec.block_size)
        assert block.num_bytes == size, f"kv_format {block} fills {block.num_bytes} of the {size} bytes of a block"

    @pytest.mark.parametrize("block_size", [1, 3, 16])
    @pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
    def test_a_step_equals_the_reference(self, rows: Sequence[Row], block_size: int) -> None:
        self.run(make_latent_case(self.spec(block_size=block_size), rows))

    @pytest.mark.parametrize("heads", [1, 5, 16])
    def test_any_number_of_heads(self, heads: int) -> None:
        self.run(make_latent_case(self.spec(num_heads=heads), MIXED))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        self.run(make_latent_case(self.spec(dtype=dtype), MIXED))

    def test_a_cache_of_8_bit_floats(self) -> None:
        self.run(make_latent_case(self.spec(kv_dtype=torch.float8_e4m3fn), MIXED))

    def test_sparse_attention(self) -> None:
        self.run(make_latent_case(self.spec(top_k=20), MIXED))

    def test_padding_changes_nothing(self) -> None:
        self.run(make_latent_case(self.spec(), MIXED), padding_rows=3, padding_tokens=5)

    def test_the_host_may_know_bounds_only(self) -> None:
        if self.found().needs_python:
            pytest.skip("its steps are not recorded")
        self.run(make_latent_case(self.spec(), BATCHES["decodes"]), captured=True, bound=70)

    def test_deterministic_steps_do_not_depend_on_the_batch(self) -> None:
        spec = self.spec(deterministic=True)
        together = self.run(make_latent_case(spec, [(40, 40), (7, 1), (0, 5)]))
        alone = self.run(make_latent_case(spec, [(79, 1), (7, 1), (0, 5)]))
        assert torch.equal(alone[0], together[39]), "the last token of a chunk has other bits than alone"


class IndexBackendSuite(PluginSuite):
    """The contract of `frame.interfaces.IndexBackend`.

        class TestMine(IndexBackendSuite):
            plugin = "mine"              # or target = "package.module:Class"

    What `supports` refuses is skipped, with its reason.
    """

    kind = "attention"
    spec_type: ClassVar[type] = IndexSpec

    def spec(self, **changes: Any) -> IndexSpec:
        """A small index that the backend supports, with some fields changed; skips when that is not supported."""
        refused = []
        for device in ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]:
            base = IndexSpec(8, 16, 12, 0.25, torch.float32, torch.float32, 16, device)
            if (reason := self.found().supports(asked := replace(base, **changes))) is None:
                return asked
            refused.append(f"{device}: {reason}")
        pytest.skip("; ".join(refused))

    def test_supports_gives_reasons_and_never_raises(self) -> None:
        base = IndexSpec(8, 16, 12, 0.25, torch.float32, torch.float32, 16, "cpu")
        for changes in ({"num_heads": 0}, {"top_k": 0}, {"dtype": torch.int8}, {"block_size": 0}):
            reason = reason_or_none(self.found().supports(replace(base, **changes)), f"supports({changes})")
            assert reason, f"supports must refuse an index with {changes}"

    @pytest.mark.parametrize("block_size", [1, 16])
    @pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
    def test_it_chooses_the_tokens_of_the_reference(self, rows: Sequence[Row], block_size: int) -> None:
        """As sets; in rows of no more tokens than are chosen anything may be said."""
        spec = self.spec(block_size=block_size)
        backends = (self.make(spec=spec), ReferenceIndex(BackendSetup(spec, Ops())))
        found, wanted = (_chosen(backend, spec, rows, padding_tokens=3) for backend in backends)
        token = 0
        for cached, count in rows:
            for place in range(token, token + count):
                if cached + count > spec.top_k:
                    assert set(found[place].tolist()) == set(wanted[place].tolist()), f"token {place} of {rows}"
            token += count


def _chosen(backend: IndexBackend, spec: IndexSpec, rows: Sequence[Row], padding_tokens: int) -> Tensor:
    """int32 [T, top_k] of a step, after one that cached what is before it."""
    paging = make_case(AttentionSpec(1, 1, 1, 1.0, spec.dtype, spec.dtype, spec.block_size, spec.device_type), rows)
    drawn = torch.Generator().manual_seed(1)
    block = backend.kv_format(spec)
    memory = torch.zeros(paging.num_blocks, block.num_bytes, dtype=torch.uint8, device=spec.device_type)
    cache, found = block.view(memory), torch.empty(0)
    whole = [
        [torch.randn(sum(row), *shape, generator=drawn).to(spec.device_type, spec.dtype) for row in rows]
        for shape in ((spec.num_heads, spec.head_dim), (spec.num_heads,), (spec.head_dim,))
    ]
    for spans in ([(0, cached) for cached, _ in rows], [(cached, cached + count) for cached, count in rows]):
        parts = [torch.cat([of[start:end] for of, (start, end) in zip(one, spans, strict=True)]) for one in whole]
        padded = [torch.cat((part, part.new_ones(padding_tokens, *part.shape[1:]))) for part in parts]
        plan = backend.plan(paging.batch(spans, padding_tokens=padding_tokens))
        found = backend.forward(spec, padded[0], padded[1], padded[2], cache, plan)
    return found
