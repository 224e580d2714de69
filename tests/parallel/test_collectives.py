"""Collectives over gloo equal what one process computes from all ranks' tensors; stand-ins have the same shapes."""

import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from frame.core.parallel.rendezvous import Rendezvous
from frame.interfaces import Mesh, Placement, UnconnectedGroup
from frame.plugins.platforms.torch_collectives import TorchCollectives
from frame.testing import run_ranks

SIZE = 3
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def tensors(dtype, shape=(6, 3)):
    torch.manual_seed(1)
    return [torch.randint(-8, 8, shape).to(dtype) for _ in range(SIZE)]


def test_each_collective_equals_a_reference():
    for dtype in DTYPES:
        given = tensors(dtype)

        def work(group, given=given):
            x = given[group.rank]
            before = x.clone()
            out = {
                "all_reduce": group.all_reduce(x),
                "all_reduce of a view": group.all_reduce(x.T),
                "all_gather": group.all_gather(x),
                "all_gather of rows": group.all_gather(x, 0),
                "reduce_scatter": group.reduce_scatter(x),
                "reduce_scatter of columns": group.reduce_scatter(x, -1),
            }
            assert torch.equal(x, before), "a collective changed its input"
            out["broadcast"] = group.broadcast(x.clone(), 2)
            return out

        total = sum(one.to(torch.float64) for one in given).to(dtype)
        for rank, out in enumerate(run_ranks(SIZE, work)):
            expected = {
                "all_reduce": total,
                "all_reduce of a view": total.T,
                "all_gather": torch.cat(given, -1),
                "all_gather of rows": torch.cat(given, 0),
                "reduce_scatter": total.chunk(SIZE)[rank],
                "reduce_scatter of columns": total.chunk(SIZE, -1)[rank],
                "broadcast": given[2],
            }
            for name, value in expected.items():
                assert torch.equal(out[name], value), (name, dtype, rank)


def test_uneven_parts_and_ranks_without_rows():
    sizes = [3, 0, 2]
    whole = torch.arange(5 * 2, dtype=torch.float32).view(5, 2)
    rows = whole.split(sizes)

    def work(group):
        gathered = group.all_gather(rows[group.rank], 0, sizes)
        scattered = group.reduce_scatter(whole, 0, sizes)
        sent = group.all_to_all(rows[group.rank], *exchanged(group.rank))
        return gathered, scattered, sent

    def exchanged(rank):
        """Rank 0 sends a row to each, rank 2 both of its rows to rank 1."""
        matrix = [[1, 1, 1], [0, 0, 0], [0, 2, 0]]
        return matrix[rank], [row[rank] for row in matrix]

    for rank, (gathered, scattered, sent) in enumerate(run_ranks(SIZE, work)):
        assert torch.equal(gathered, whole)
        assert torch.equal(scattered, SIZE * rows[rank])
        expected = [whole[:1], torch.cat((whole[1:2], whole[3:5])), whole[2:3]]
        assert torch.equal(sent, expected[rank])


def test_tensors_are_handed_over_by_name_and_bytes_are_gathered():
    def work(group):
        mine = {"hidden": torch.full((2, 3), float(group.rank)), "nothing": torch.empty(0)}
        following, before = (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
        into = {name: torch.empty_like(tensor) for name, tensor in mine.items()}
        if group.rank:
            group.receive(into, before)
        group.send(mine, following)
        if not group.rank:
            group.receive(into, before)
        gathered = group.host.gather(b"x" * group.rank)
        group.host.barrier()
        return float(into["hidden"][0, 0]), gathered

    for rank, (received, gathered) in enumerate(run_ranks(SIZE, work)):
        assert received == (rank - 1) % SIZE
        assert gathered == [b"", b"x", b"xx"]


def test_a_worker_that_never_comes_is_one_sentence():
    def work(group):
        if group.rank:
            return ""
        with pytest.raises(TimeoutError) as raised:
            group.host.gather(b"", timeout_seconds=0.2)
        return str(raised.value)

    said, *_ = run_ranks(2, work)
    assert re.match("the tensor group of 2 workers: the other workers did not come, or ended: ", said), said


def test_groups_of_different_ranks_overlap():
    import threading

    from frame.core.config.data_parallel import DataParallelConfig
    from frame.core.parallel.rendezvous import Rendezvous, placements_of

    rendezvous, mesh, found = Rendezvous(), Mesh(tensor=2, pipeline=2), {}

    def run(placement: Placement) -> None:
        collectives = TorchCollectives(placement)
        mine = torch.tensor([10.0**placement.rank])
        found[placement.rank] = [
            float(collectives.group(axis, mesh.ranks(axis, placement.rank)).all_reduce(mine))
            for axis in ("tensor", "pipeline")
        ]
        collectives.close()

    threads = [
        threading.Thread(target=run, args=(one,))
        for one in placements_of(mesh, rendezvous.address, DataParallelConfig())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rendezvous.close()
    assert found == {0: [11.0, 101.0], 1: [11.0, 1010.0], 2: [1100.0, 101.0], 3: [1100.0, 1010.0]}


@pytest.mark.parametrize("where", ["", "http://x", "tcp://host", "file:"])
def test_another_rendezvous_is_refused(where):
    with pytest.raises(ValueError, match="is none of file:///PATH, tcp://HOST:PORT, store://HOST:PORT/PREFIX"):
        TorchCollectives(Placement(mesh=Mesh(tensor=2), rendezvous=where))


def test_groups_without_peers_give_the_same_shapes():
    x = torch.ones(6, 3)

    def work(group):
        return shapes(group, x)

    assert run_ranks(SIZE, work) == [shapes(UnconnectedGroup(rank, SIZE), x) for rank in range(SIZE)]


def shapes(group, x):
    results = group.all_reduce(x), group.all_gather(x), group.all_gather(x, 0), group.reduce_scatter(x, 0)
    return [tuple(result.shape) for result in results]


def test_the_host_side_gathers_messages_of_any_length():
    """Short ones in one exchange, longer ones in two."""
    lengths = [0, 1, 56, 57, 5000]

    def work(group):
        pairs = [(mine, other) for mine in lengths for other in lengths]
        return [group.host.gather(bytes([65 + group.rank]) * pair[group.rank]) for pair in pairs]

    expected = [[b"A" * mine, b"B" * other] for mine in lengths for other in lengths]
    assert run_ranks(2, work) == [expected, expected]


def test_groups_that_outlive_their_collectives_touch_no_other_file():
    """The rendezvous is known by the number of a descriptor, which is another file's once it was closed."""
    rendezvous = Rendezvous()
    placements = [Placement(rank=rank, mesh=Mesh(tensor=2), rendezvous=rendezvous.address) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        collectives = list(threads.map(TorchCollectives, placements))
        groups = list(threads.map(lambda one: one.group("tensor", [0, 1]), collectives))
    for one in collectives:
        one.close()
    number = int(rendezvous.address.rpartition("/")[2])
    rendezvous.close()
    if (other := os.memfd_create("another file")) != number:
        os.dup2(other, number)
        os.close(other)
    del collectives, groups, one
    gc.collect()
    assert os.fstat(number).st_size == 0
    os.close(number)
