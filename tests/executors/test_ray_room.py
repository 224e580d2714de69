"""Where the Ray executor puts workers, for clusters that are only described."""

import pytest

from frame.plugins.executors.ray_room import device_number, strategies

GPU = {"CPU": 1.0, "GPU": 1.0}


def nodes(*gpus, cpus=64.0):
    return [{"CPU": cpus, "GPU": float(count)} for count in gpus]


@pytest.mark.parametrize(
    ("gpus", "tensor", "groups", "packed"),
    [
        ((8, 8), 8, 2, 2),
        ((3, 3), 2, 2, 2),
        ((3, 1, 1, 1), 2, 3, 1),  # only one group finds a node that has room for all of it
        ((1, 1), 2, 1, 0),
    ],
)
def test_as_many_tensor_groups_as_fit_stay_on_one_node_and_come_first(gpus, tensor, groups, packed):
    found = strategies(nodes(*gpus), GPU, tensor, groups)
    assert found == ["STRICT_PACK"] * packed + ["PACK"] * (groups - packed)


def test_the_resource_that_lacks_is_named():
    with pytest.raises(ValueError, match="4 workers need 4 GPU, and it has 2 on 2 nodes"):
        strategies(nodes(1, 1), GPU, 2, 2)
    with pytest.raises(ValueError, match="2 workers need 2 CPU, and it has 0 on 1 nodes"):
        strategies(nodes(2, cpus=0.0), GPU, 2, 1)


def test_room_that_is_left_over_on_several_nodes_holds_no_worker():
    said = r"3 workers need 1 CPU each, and its 2 nodes have room for 1, 1 of them"
    with pytest.raises(ValueError, match=said):
        strategies([{"CPU": 1.5}, {"CPU": 1.5}], {"CPU": 1.0}, 3, 1)


def test_fractions_of_a_device_add_up():
    assert strategies([{"GPU": 1.0}], {"GPU": 0.1}, 10, 1) == ["STRICT_PACK"]


def test_a_device_is_counted_among_those_that_a_process_sees():
    assert device_number("3", None) == 3
    assert device_number("5", "4,5") == 1
    assert device_number("GPU-b", "GPU-a, GPU-b") == 1
    with pytest.raises(ValueError, match="Ray gave the GPU '3', and CUDA_VISIBLE_DEVICES there has '4,5'"):
        device_number("3", "4,5")
