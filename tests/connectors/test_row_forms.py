"""Which heads of which worker's rows belong into a row of an engine that divides the model otherwise."""

from __future__ import annotations

import itertools

import pytest
import torch

from frame.plugins.connectors.offload.row_forms import LayerForm, RowForm, copy_pieces, pieces_of

TOTAL, TOKENS, DIM = 4, 3, 2


def rows_of(ranks, order, heads=TOTAL):
    """Forms and rows of so many ranks, whose numbers say what they are: layer, key or value, token, head, place."""
    forms, rows = [], []
    for rank in range(ranks):
        count = max(1, heads // ranks)
        first = rank * heads // ranks
        size = 2 * TOKENS * count * DIM * 4
        layers, parts = [], []
        for layer in range(2):
            shape = (2, TOKENS, count, DIM)
            layers.append(
                LayerForm(
                    f"layer{layer}",
                    2 * size * layer,
                    2,
                    size,
                    shape,
                    order,
                    "torch.int32",
                    1,
                    2,
                    (first, first + count),
                    heads,
                )
            )
            for block, kind in itertools.product(range(2), [0]):
                token, head, place = torch.meshgrid(
                    torch.arange(TOKENS), torch.arange(first, first + count), torch.arange(DIM), indexing="ij"
                )
                one = layer * 10000 + block * 1000 + token * 100 + head * 10 + place + kind
                parts.append(torch.stack([one, one + 5]).permute(order).contiguous().to(torch.int32).view(-1))
        forms.append(RowForm(4 * size, layers))
        rows.append(torch.cat(parts).view(torch.uint8))
    return forms, rows


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3)], ids=str)
@pytest.mark.parametrize(("first", "second"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_each_head_comes_from_a_rank_that_has_it(first, second, order):
    """Also where there are more ranks than heads, so that several ranks hold the same ones."""
    theirs, rows = rows_of(first, order)
    mine, wanted = rows_of(second, order)
    for form, row in zip(mine, wanted, strict=True):
        pieces = pieces_of(form, theirs)
        assert pieces is not None
        made = torch.zeros(form.row_bytes, dtype=torch.uint8)
        copy_pieces(
            pieces, form, made, {place: (theirs[place], rows[place]) for place in {one.place for one in pieces}}
        )
        assert torch.equal(made, row)
        assert form.family == theirs[0].family


def test_what_is_missing_is_said():
    order = (0, 1, 2, 3)
    theirs, _ = rows_of(2, order)
    ((mine,), _) = rows_of(1, order)
    assert pieces_of(mine, theirs[:1]) is None
    assert pieces_of(mine, rows_of(2, (2, 0, 1, 3))[0]) is None
    assert pieces_of(mine, rows_of(1, order, heads=2)[0]) is None
    assert rows_of(1, order, heads=2)[0][0].family != mine.family
    assert rows_of(2, (2, 0, 1, 3))[0][0].family != mine.family
