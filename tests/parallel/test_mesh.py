"""The ranks of each axis; the examples are those of the field: tensor ranks are neighbours, experts span data ranks."""

import pytest

from frame.interfaces import Mesh


def groups(mesh, axis):
    return sorted({mesh.ranks(axis, rank) for rank in range(mesh.size)})


def test_tensor_ranks_are_neighbours_and_stages_are_apart():
    mesh = Mesh(tensor=2, pipeline=4)
    assert groups(mesh, "tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups(mesh, "pipeline") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups(mesh, "data") == [(rank,) for rank in range(8)]
    assert mesh.output_rank == 6


def test_experts_are_spread_over_data_and_tensor_ranks_of_a_stage():
    mesh = Mesh(data=2, pipeline=2, tensor=2, expert_parallel=True)
    assert groups(mesh, "expert") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert groups(mesh, "data") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.stage_ranks(5) == (0, 1, 4, 5)
    assert Mesh(prefill_context=2, pipeline=2, tensor=2).stage_ranks(5) == (4, 5, 6, 7)
    assert groups(Mesh(data=2, tensor=2), "expert") == [(0,), (1,), (2,), (3,)]


def test_context_axes():
    assert groups(Mesh(tensor=4, decode_context=2), "decode_context") == [(0, 1), (2, 3)]
    mesh = Mesh(tensor=2, prefill_context=2, pipeline=2)
    assert groups(mesh, "prefill_context") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups(mesh, "pipeline") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data", "expert", "prefill_context", "decode_context"])
def test_a_rank_is_in_its_group_at_its_index(axis):
    mesh = Mesh(data=3, pipeline=2, prefill_context=2, tensor=4, decode_context=2, expert_parallel=True)
    for rank in range(mesh.size):
        assert mesh.ranks(axis, rank)[mesh.index(axis, rank)] == rank
