"""Where workers fit in a Ray cluster, and which device of its machine a worker gets. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Ray counts resources in ten-thousandths.
_LEAST = 1e-4


def room(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many workers that need `bundle` each fit on a node of those resources."""
    return min(int((resources.get(name, 0.0) + _LEAST) / amount) for name, amount in bundle.items())


def strategies(
    nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], tensor: int, groups: int
) -> list[str]:
    """How Ray is to place each of `groups` tensor groups of `tensor` workers, given the resources of all nodes.

    As many as fit stay on one node each, and come first, so that the others do not take their room. Raises `ValueError`
    where the nodes cannot hold all workers even when nobody else uses them.
    """
    count = tensor * groups
    for name, amount in bundle.items():
        there = sum(node.get(name, 0.0) for node in nodes)
        if there + _LEAST < amount * count:
            raise ValueError(
                f"the Ray cluster is too small: {count} workers need {amount * count:g} {name}, and it has {there:g} "
                f"on {len(nodes)} nodes"
            )
    rooms = [room(node, bundle) for node in nodes]
    if sum(rooms) < count:
        each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        raise ValueError(
            f"the Ray cluster is too small: {count} workers need {each} each, and its {len(nodes)} nodes have room for "
            f"{', '.join(map(str, rooms))} of them"
        )
    together = min(groups, sum(places // tensor for places in rooms))
    return ["STRICT_PACK"] * together + ["PACK"] * (groups - together)


def device_number(gpu: str, visible: str | None) -> int:
    """The number of the GPU that Ray names, among those that a process sees whose CUDA_VISIBLE_DEVICES is `visible`."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    if gpu in names:
        return names.index(gpu)
    if names or not gpu.isdecimal():
        raise ValueError(f"Ray gave the GPU {gpu!r}, and CUDA_VISIBLE_DEVICES there has {visible!r}")
    return int(gpu)
