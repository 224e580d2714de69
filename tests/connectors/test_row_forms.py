"""Which heads of which worker's rows belong into a row of an engine that divides the model otherwise."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace as replace_view

import msgspec
import pytest
import torch

from frame.interfaces import BlockFormat, CacheView, StateRun, encode
from frame.plugins.connectors.blocks.step_worker import Stored
from frame.plugins.connectors.offload import row_forms
from frame.plugins.connectors.offload.row_forms import LayerForm, RowForm, copy_pieces, family_of, pieces_of, state_form

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
        assert family_of([form]) == family_of(theirs)


def test_what_is_missing_is_said():
    order = (0, 1, 2, 3)
    theirs, _ = rows_of(2, order)
    ((mine,), _) = rows_of(1, order)
    assert pieces_of(mine, theirs[:1]) is None
    assert pieces_of(mine, rows_of(2, (2, 0, 1, 3))[0]) is None
    assert pieces_of(mine, rows_of(1, order, heads=2)[0]) is None
    assert family_of(rows_of(1, order, heads=2)[0]) != family_of([mine])
    assert family_of(rows_of(2, (2, 0, 1, 3))[0]) != family_of([mine])


#: Bytes of a row of these tensors: odd numbers of small elements, so that rows begin anywhere.
TENSORS = {"conv": (torch.bfloat16, 3), "scan": (torch.float32, 5), "gate": (torch.uint8, 1)}


def states_of(rank, ranks):
    """The states of one of so many ranks: (what a worker knows of them, a row), of two layers of eight heads.

    The convolution has two runs of channels, of which the second has two, so that several ranks have the same one.
    """
    caches, blocks = {}, []
    for layer in range(2):
        first, count = rank * 8 // ranks, 8 // ranks
        shared = (rank * 2 // ranks, max(1, 2 // ranks), 2)
        shares = {"gate": [(first, count, 8)], "conv": [(first, count, 8), shared], "scan": [(first, count, 8)]}
        parts, runs, block = [], [], []
        for number, (name, runs_of) in enumerate(shares.items()):
            dtype, width = TENSORS[name]
            begin = sum(map(len, block))
            for run, (start, length, total) in enumerate(runs_of):
                runs.append(StateRun(dtype, width * dtype.itemsize, start, start + length, total))
                facts = torch.arange(start, start + length)[:, None] * 7 + torch.arange(width * dtype.itemsize)
                block.append((facts + 100 * layer + 30 * number + 15 * run).to(torch.uint8).view(-1))
            parts.append((dtype, sum(map(len, block)) - begin))
        blocks.append(torch.cat(block))
        raw = BlockFormat((len(blocks[-1]),), (0,), torch.uint8)
        caches[f"layer{layer}"] = CacheView(blocks[-1].view(1, -1), raw, 0, None, 1, tuple(parts), tuple(runs))
    stored = Stored.of_states(caches)
    return caches, stored, torch.cat([part.cache[0] for part in stored.parts])


@pytest.mark.parametrize(("first", "second"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_each_run_of_a_state_comes_from_a_rank_that_has_it(first, second):
    theirs = [states_of(rank, first) for rank in range(first)]
    forms = [state_form(stored, caches, f"worker {rank}") for rank, (caches, stored, _) in enumerate(theirs)]
    for rank in range(second):
        caches, stored, row = states_of(rank, second)
        form = state_form(stored, caches, f"worker {rank} of others")
        assert form.row_bytes == len(row) == sum(layer.block_bytes for layer in form.layers)
        pieces = pieces_of(form, forms)
        assert pieces is not None
        made = torch.zeros(len(row) + 1, dtype=torch.uint8)[1:]  # at an odd address
        copy_pieces(pieces, form, made, {one.place: (forms[one.place], theirs[one.place][2]) for one in pieces})
        assert torch.equal(made, row)
        assert family_of([form]) == family_of(forms)


def test_states_of_other_types_or_whose_runs_are_not_told_are_of_another_family():
    caches, stored, _ = states_of(0, 1)
    mine = state_form(stored, caches, "worker 0")
    for name, view in caches.items():
        run = view.runs[0]
        for changed in ((), (run._replace(dtype=torch.int8), *view.runs[1:]), view.runs[:-1]):
            other = {**caches, name: replace_view(view, runs=changed)}
            form = state_form(Stored.of_states(other), other, "worker 0")
            assert family_of([form]) != family_of([mine])
            assert pieces_of(mine, [form]) is None
            one = state_form(Stored.of_states(other), other, "worker 1")
            assert family_of([one]) != family_of([form])


@pytest.mark.parametrize(
    "changed",
    [
        {"start": -1}, {"start": 1 << 62}, {"count": 0}, {"count": -2}, {"count": 1 << 40}, {"block_bytes": 8},
        {"block_bytes": 1 << 63}, {"shape": ()}, {"shape": (1,) * 9, "order": tuple(range(9))},
        {"shape": (2, 3, -2, 2)}, {"shape": (2, 3, 1, 2)}, {"order": (0, 1, 2, 2)}, {"order": (0, 1, 2)},
        {"dtype": "torch.nn"}, {"dtype": "none"}, {"block_axis": 5}, {"block_axis": -1}, {"head_axis": 4},
        {"head_axis": -1}, {"heads": (2, 1)}, {"heads": (-1, 1)}, {"heads": (3, 5)}, {"heads": (0, 3)},
    ],
    ids=str,
)  # fmt: skip
def test_a_form_that_can_be_of_no_row_is_refused(changed):
    ((form, _), _) = rows_of(2, (0, 1, 2, 3))
    assert RowForm.read(encode(form)) == form
    layers = [form.layers[0], msgspec.structs.replace(form.layers[1], **changed)]
    with pytest.raises(ValueError, match=r"^(a layer|no elements)"):
        RowForm.read(encode(RowForm(form.row_bytes, layers)))


def test_what_is_no_form_is_refused(monkeypatch):
    ((form, _), _) = rows_of(2, (0, 1, 2, 3))
    data = encode(form)
    for cut in range(len(data)):
        with pytest.raises(ValueError, match=r"is none$"):
            RowForm.read(data[:cut])
    for row_bytes in (-1, 1 << 41):
        with pytest.raises(ValueError, match=r"^a row has a size"):
            RowForm.read(encode(RowForm(row_bytes, [])))
    monkeypatch.setattr(row_forms, "decode", None)  # more than it may have is not decoded
    with pytest.raises(ValueError, match=r"^a form has more bytes"):
        RowForm.read(bytes(row_forms.MOST_FORM_BYTES + 1))


def test_forms_of_any_bytes_end_no_reader():
    draw = random.Random(0)
    ((form, _), _) = rows_of(2, (0, 1, 2, 3))
    for _ in range(3000):
        data = bytearray(encode(form))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            other = RowForm.read(bytes(data))
        except ValueError:
            continue
        pieces = pieces_of(form, [other])
        if pieces is not None:
            row = torch.empty(other.row_bytes if other.row_bytes < 1 << 20 else 0, dtype=torch.uint8)
            if len(row) == other.row_bytes:
                copy_pieces(pieces, form, torch.zeros(form.row_bytes, dtype=torch.uint8), {0: (other, row)})


def test_stages_of_a_pipeline_are_of_the_family_of_their_layers():
    forms, _ = rows_of(2, (0, 1, 2, 3))
    stages = [RowForm(form.row_bytes, form.layers[place : place + 1]) for place in range(2) for form in forms]
    assert family_of(stages) == family_of(forms) == family_of([*stages, RowForm(0, [])])
    assert family_of(stages[:2]) != family_of(forms)
    assert all(pieces_of(form, stages) is not None for form in forms)
    assert all(pieces_of(stage, forms) is not None for stage in stages)
