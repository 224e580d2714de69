"""Layers that launch what others launch are left out; places count."""

from torch import nn

from frame.core.layers.build import Layers
from frame.core.worker.start.trial_steps import distinct_layers


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
