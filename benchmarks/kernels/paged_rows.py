"""Rows of equal length over randomly placed pages, for benchmarks of attention, and how far a result is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: A layer of Llama 8B, and the page.
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16


@dataclass(frozen=True)
class PagedRows:
    """Of each of `num_rows` rows the last `query_len` of `length` tokens, whose keys and values `kv_cache` holds.

    `query` [rows · query_len, heads, dim], `kv_cache` [2, pages, page, KV heads, dim].
    """

    num_rows: int
    length: int
    query_len: int
    query: Tensor
    kv_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @classmethod
    def made(
        cls, num_rows: int, length: int, query_len: int, kv_dtype: torch.dtype, device: str, seed: int = 0
    ) -> PagedRows:
        """Random ones; equal seeds give equal numbers, each rounded to `kv_dtype`."""
        torch.manual_seed(seed)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32  # which the interpreter multiplies as it is
        blocks = -(-length // PAGE)
        shape = num_rows * blocks + 1, 2, PAGE, KV_HEADS, DIM
        cache = torch.empty(shape, dtype=kv_dtype, device=device)
        for block in cache.split(4096):  # so that a cache of 8 bits takes little more memory than it has
            block.copy_(torch.randn(block.shape, dtype=dtype, device=device))
        return cls(
            num_rows,
            length,
            query_len,
            query=torch.randn(num_rows * query_len, HEADS, DIM, dtype=dtype, device=device),
            kv_cache=cache.transpose(0, 1),
            query_start=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * query_len,
            seq_lens=torch.full((num_rows,), length, dtype=torch.int32, device=device),
            block_table=(torch.randperm(num_rows * blocks, device=device) + 1).int().view(num_rows, -1),
        )

    def error(self, out: Tensor) -> float:
        """How far the first row of `out` [T, heads, dim] is off, relative, against torch in float32."""
        pages = self.kv_cache[:, self.block_table[0].long()].flatten(1, 2)[:, : self.length]
        keys, values = pages.float().transpose(1, 2)[:, None]
        query = self.query[: self.query_len].float().transpose(0, 1)[None]
        place = torch.arange(self.length, device=query.device)
        seen = place[None] <= place[self.length - self.query_len :, None]
        want = scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
        return float((out[: self.query_len].float() - want).norm() / want.norm())


def microseconds(call: Callable[[], object]) -> float:
    """Median time of a call, replayed from a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()  # the graph is captured on a stream that would not wait for the inputs
    return float(do_bench_cudagraph(call, return_mode="median")) * 1e3


def sizes(text: str, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Cases such as 64x8192,1x32768 of as many numbers as there are `names`; raises `ValueError` for others."""
    found = []
    for part in text.split(","):
        numbers = [int(number) if number.isdecimal() else 0 for number in part.split("x")]
        if len(numbers) != len(names) or min(numbers) < 1:
            raise ValueError(f"a case is {'x'.join(names)}, all of them at least 1; got {part!r}")
        found.append(tuple(numbers))
    return found
