"""Decode steps of few rows by `frame.kernels.decode_few`: for which layers and steps, and the sizes of a launch.

A captured step is planned for the longest rows that there can be and launched as it was planned, so that what is chosen
here must hold for rows of any length up to that. Knows no model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from frame.interfaces import AttentionSpec, GroupBatch
from frame.kernels import decode_few
from frame.kernels.decode_few import FewLaunch
from frame.kernels.hopper import is_hopper

#: The most rows of a step.
MOST_ROWS = 8


@dataclass(frozen=True)
class FewRule:
    """What serves heads of up to `head_dim` while a program for each row and KV head makes up to `share` for each SM.

    It holds where rows have at most `longest` keys to read. These are split until about `programs` run for each
    multiprocessor (SM), into at most `launch.splits` parts.
    """

    head_dim: int
    share: float
    longest: float
    programs: float
    launch: FewLaunch


_SMALL = FewLaunch(128, 8, 16, 256, lets_in=False)
_USUAL = FewLaunch(32, 4, 32, 64)
#: Measured on an H200 for 2 to 8 query heads a KV head, 1, 4 and 8 rows of up to 4,096 tokens, one row of up to 131,072
#: (`benchmarks/kernels/few_decodes.py`): up to `longest` keys none took longer than by `frame.kernels.decode`.
#: 8,192 lies between 4,096, where one row is quicker by a third, and 16,384, where it is within 3 %; it was not timed.
FEW_RULES = (
    FewRule(64, 0.065, 8192, 1, _SMALL),
    FewRule(64, 0.25, 4096, 1, _SMALL),
    FewRule(64, 0.5, 1024, 1, _SMALL),
    FewRule(128, 0.065, 8192, 2, _USUAL),
    FewRule(128, 0.13, 4096, 2, _USUAL),
    FewRule(128, 0.5, 1024, 2, _USUAL),
)
#: What other steps take where a user asks for it: twice the keys on their way in as many programs, two of which have
#: room on a multiprocessor. On an H200 one row of Llama 8B takes 14 µs of 4,096 tokens (19 by `frame.kernels.decode`),
#: but 75 of 32,768 (56).
ANY_FEW = FewRule(128, float("inf"), float("inf"), 2, FewLaunch(64, 4, 64, 128))


def serves_few(spec: AttentionSpec, wanted: bool | None) -> bool:
    """Whether the kernel can serve such a layer here; unless it is `wanted`, on the chip that it was measured on."""
    others = spec.soft_cap or spec.alibi or spec.returns_lse or spec.deterministic or spec.context.ranks > 1
    if wanted is False or others or spec.kind != "decoder":
        return False
    if not decode_few.fits(spec.head_dim, spec.num_heads // spec.num_kv_heads, spec.dtype, spec.kv_dtype):
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return bool(wanted) or interpreted or (torch.cuda.is_available() and is_hopper(torch.device(spec.device_type)))


def few_launch(spec: AttentionSpec, batch: GroupBatch, multiprocessors: int, *, always: bool) -> FewLaunch | None:
    """The launch for a batch in which each row has one token, None for steps that other kernels serve better.

    With `always` steps of up to `MOST_ROWS` rows take it whatever their length.

    The launch is `early` in captured steps alone. These write their inputs, then plan, then run their layers, and no
    hook of a connector is called between (`LayerHooks.decode_steps`). So a launch in `plan` that is not chained lies
    behind all that wrote what the kernel reads before it waits; the caller makes it. It does not rest on a model's
    first launches: those of a later pipeline stage may all be chained. In other steps hooks may write the cache between
    two layers, and the kernel waits first.
    """
    rows = len(batch.host_query_lens)
    if not 0 < rows <= MOST_ROWS or batch.max_query_len > 1 or batch.deterministic or batch.prefix is not None:
        return None
    longest = int(batch.host_seq_lens.max())
    if spec.window:
        longest = min(longest, spec.window)
    share = rows * spec.num_kv_heads / multiprocessors
    for rule in (*FEW_RULES, ANY_FEW) if always else FEW_RULES:
        if spec.head_dim <= rule.head_dim and share <= rule.share and longest <= rule.longest:
            captured = batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
            return replace(_split(rule, spec, rows, multiprocessors), early=captured)
    return None


def _split(rule: FewRule, spec: AttentionSpec, rows: int, multiprocessors: int) -> FewLaunch:
    """The rule's launch with a power of two of splits; numbers of rows between two of these are split as the next.

    Only a window limits them, not the rows of the step: a program without keys ends at once, and rows of all lengths
    are served by one kernel, which a warm-up meets.
    """
    launch, pairs = rule.launch, spec.num_kv_heads << (rows - 1).bit_length()
    parts = min(launch.splits, int(rule.programs * multiprocessors / pairs))
    if spec.window:
        parts = min(parts, spec.window // launch.min_span)
    return replace(launch, splits=1 << (parts.bit_length() - 1)) if parts > 1 else replace(launch, splits=1, min_span=0)
