"""Steps of a decoder's rows over what an encoder gave, for attention backends that support the kind "cross"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec

from .attention_case import AttentionCase, CaseRun, make_case

#: Of each row the tokens that its encoder gave, and its own tokens of a step.
_ROWS = ((37, 1), (5, 3), (16, 1), (129, 7), (1, 1), (40, 20))


def check_across(backend: AttentionBackend, spec: AttentionSpec, bound: float) -> None:
    """Asserts that rows get the reference's output: while all begin, while some do, and while none does."""
    case = make_case(spec, _ROWS)
    run = CaseRun(backend, case, stale=float("nan"))
    order = range(len(_ROWS))
    for rows, begun in ((order[:4], order[:4]), (order, order[4:]), (order, ()), (order[1:3], ())):
        query, key, value, batch = _step(case, rows, begun)
        with torch.inference_mode():
            out: Any = backend.forward(case.layer, query, key, value, run.caches[0], backend.plan(batch))
        assert list(out.shape) == list(query.shape)
        want = torch.cat([_expected(case, row) for row in rows])
        torch.testing.assert_close(out[: len(want)].cpu().float(), want.float(), atol=bound, rtol=bound)
        assert torch.isfinite(out).all(), "the output holds NaN or infinity (rows of padding included)"


def _step(case: AttentionCase, rows: Sequence[int], begun: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(query [T, H, D], key and value [E, Hk, D], batch), with a row of padding and two tokens more than rows have."""
    part = case.of_rows(rows)
    spans = [(encoded, encoded + count) for encoded, count in part.rows]
    batch, (query, _, _) = part.batch(spans, padding_rows=1, padding_tokens=2), part.inputs(spans, 2)
    lens = np.array([*(encoded for encoded, _ in part.rows), 0], np.int32)
    slots = [np.zeros(0, np.int64), *(case.places(row)[: case.rows[row][0]] for row in begun)]
    stored = [
        torch.cat([one[0][:0], *(one[row][: case.rows[row][0]] for row in begun)]) for one in (case.keys, case.values)
    ]
    device = case.spec.device_type
    batch = replace(
        batch,
        seq_lens=torch.from_numpy(lens).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        host_seq_lens=lens,
        max_seq_len=int(lens.max()),
    )
    return query, stored[0], stored[1], batch


def _expected(case: AttentionCase, row: int) -> Tensor:
    """[tokens, H, D] of a row's own tokens over all that its encoder gave, computed on the host."""
    spec, (encoded, _) = case.spec, case.rows[row]
    groups = spec.num_heads // spec.num_kv_heads
    query = case.queries[row][encoded:].cpu().double()
    key, value = (x[row][:encoded].cpu().double().repeat_interleave(groups, 1) for x in (case.keys, case.values))
    weights = (torch.einsum("qhd,khd->qhk", query, key) * spec.scale).softmax(-1)
    return torch.einsum("qhk,khd->qhd", weights, value)
