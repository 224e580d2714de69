"""Layers that launch what others launch are left out; places count."""

import threading

import pytest
from torch import nn

from frame.core.config.flat import from_flat
from frame.core.layers.build import Layers
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start import trial_steps
from frame.core.worker.start.trial_steps import distinct_layers
from frame.interfaces import Kernels, Steps
from frame.plugins.platforms.cpu import CpuPlatform
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, running
from frame.testing.thread_executor import with_threads


class Stack(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = Layers(nn.Sequential(nn.Linear(size, size), nn.ReLU()) for size in sizes)


def kept(sizes):
    stack = Stack(sizes)
    all_layers = list(stack.layers)
    with distinct_layers(stack):
        found = [all_layers.index(layer) for layer in stack.layers]
    assert list(stack.layers) == all_layers
    return found


def test_the_first_one_of_each_pair_and_the_last_stay():
    assert kept([8] * 6) == [0, 1, 5]
    assert kept([8, 4] * 4) == [0, 1, 2, 7]
    assert kept([8, 8, 4, 8, 8]) == [0, 1, 2, 3, 4]
    assert kept([8]) == [0]


class Rehearsed(Kernels):
    """The first rank knows its kernels from an earlier start; the others rehearse their steps, as the first start did.

    What runs in a rehearsal breaks off, before it waits for anybody.
    """

    rehearses = threading.local()

    def __init__(self, rank):
        self.rank = rank

    def prepare(self, run):
        if self.rank == 0:
            run(brief=True)
            return
        self.rehearses.now = True
        with pytest.raises(IndexError):
            run()
        self.rehearses.now = False
        run()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_whose_rehearsal_broke_off_runs_the_steps_that_the_others_run(tmp_path, monkeypatch, ranks):
    """Else it would wait for them in collectives of steps that they do not run."""
    thorough = {}

    def warms_up(*sizes, **options):
        if getattr(Rehearsed.rehearses, "now", False):
            raise IndexError("what a kernel should have written is zeros")
        thorough.setdefault(threading.get_ident(), []).append(options["thorough"])

    monkeypatch.setattr(trial_steps, "warm_up", warms_up)
    monkeypatch.setattr(
        CpuPlatform, "steps", lambda platform: Steps(kernels=Rehearsed(platform.local_rank + (ranks == 1)))
    )
    settings = {**SMALL, "model": str(make_checkpoint(tmp_path, "llama")), "num_threads": 1}
    settings |= {"executor": "threads", "tensor_parallel_size": ranks}
    with running(from_flat(settings), with_threads(Registry.load())):
        pass
    assert list(thorough.values()) == ([[True]] if ranks == 1 else [[False], [False]])
