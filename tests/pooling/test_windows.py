"""Windows of encoders: what a token sees on both sides, at the borders of windows and of tiles, over ranks."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from frame.plugins.attention.own_rows import EqualRows, OwnRows
from frame.plugins.attention.paging import TILE
from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from tests.pooling.conftest import make_prompts, near, open_llm


def attend(query, keys, values, mask):
    return functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


@pytest.mark.parametrize("window", [1, 2, 17, TILE - 1, TILE, TILE + 1])
@pytest.mark.parametrize("length", [1, 16, 17, TILE, TILE + 1, 2 * TILE + 40])
def test_a_token_sees_those_less_than_a_window_away(window, length):
    torch.manual_seed(0)
    count, heads, size = 2, 4, 8
    query = torch.randn(count * length, heads, size, dtype=torch.float64)
    key, value = torch.randn(2, count * length, 2, size, dtype=torch.float64)
    found = OwnRows([EqualRows(count, length, 0, None)], True, window).attend(attend, query, key, value)
    near_by = (torch.arange(length)[:, None] - torch.arange(length)[None]).abs() < window
    for row in range(count):
        mine = slice(row * length, (row + 1) * length)
        keys, values = (part[mine].repeat_interleave(2, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[mine], keys) * size**-0.5
        weights = scores.masked_fill(~near_by, -torch.inf).softmax(-1)
        torch.testing.assert_close(found[mine], torch.einsum("hqk,khd->qhd", weights, values))


def test_deterministic_rows_with_windows_have_the_bits_that_they_have_alone(tmp_path):
    folder = make_pooling_checkpoint(tmp_path, "modernbert")
    prompts = make_prompts()
    llm = open_llm(folder, deterministic=True)
    together = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    alone = [llm.embed(prompt, use_tqdm=False)[0].outputs.embedding for prompt in prompts]
    assert all(np.array_equal(first, second) for first, second in zip(together, alone, strict=True))
    llm.close()


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["modernbert-tokens", "electra-tokens"])
def test_two_ranks_give_the_classes_of_one(family, tmp_path):
    folder = make_pooling_checkpoint(tmp_path, family)
    prompts = make_prompts((60, 3, 33, 1))

    def rows(**settings):
        llm = open_llm(folder, **settings)
        outputs = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
        llm.close()
        return np.concatenate([output.outputs.data for output in outputs])

    assert near(rows(tensor_parallel_size=2), rows())
