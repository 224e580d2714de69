"""Expert placement from the loads alone, in three greedy steps: groups to nodes, replicas, replicas to ranks.

The algorithm is DeepSeek's expert-parallel load balancer (EPLB, 2025). All ties go to the lowest index, so that equal
loads give equal placements on every machine.
"""

from __future__ import annotations

import numpy as np

from frame.interfaces import ExpertBalancer, ExpertPlacement, SlotShape


class HierarchicalBalancer(ExpertBalancer):
    """Keeps the experts of a group on one node where groups divide over nodes; else every rank may hold any expert."""

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        del current
        if problems := shape.problems(loads.shape[1]):
            raise ValueError("; ".join(problems))
        groups, nodes = (shape.num_groups, shape.num_nodes) if shape.num_groups % shape.num_nodes == 0 else (1, 1)
        return hierarchical(loads.astype(np.float64), shape.num_slots, shape.num_ranks, groups, nodes)


def hierarchical(loads: np.ndarray, num_slots: int, num_ranks: int, num_groups: int, num_nodes: int) -> ExpertPlacement:
    """The placement for float64 `loads` [L, E]; `num_groups` must be a multiple of `num_nodes`."""
    layers, experts = loads.shape
    group_size, groups_per_node = experts // num_groups, num_groups // num_nodes
    # 1. Experts are renumbered, so that those of a group, and the groups of a node, follow each other.
    node, place = pack(loads.reshape(layers, num_groups, -1).sum(2), num_nodes)
    new_group = node * groups_per_node + place
    new_id = (new_group[:, :, None] * group_size + np.arange(group_size)).reshape(layers, experts)
    old_id = np.empty_like(new_id)
    np.put_along_axis(old_id, new_id, np.broadcast_to(np.arange(experts), new_id.shape), 1)
    # 2. Every node replicates its experts. Rows are nodes of layers from here on.
    per_node = np.take_along_axis(loads, old_id, 1).reshape(layers * num_nodes, -1)
    expert, replica, counts = replicate(per_node, num_slots // num_nodes)
    # 3. The replicas of a node are packed onto its ranks.
    each = np.take_along_axis(per_node / counts, expert, 1)
    rank, position = pack(each, num_ranks // num_nodes)
    slot = rank * (num_slots // num_ranks) + position
    replica_at = np.empty_like(slot)
    np.put_along_axis(replica_at, slot, np.broadcast_to(np.arange(slot.shape[1]), slot.shape), 1)
    local = np.take_along_axis(expert, replica_at, 1).reshape(layers, num_nodes, -1)
    renumbered = (local + np.arange(num_nodes)[:, None] * (experts // num_nodes)).reshape(layers, num_slots)
    expert_of = np.take_along_axis(old_id, renumbered, 1)
    replica_of = np.take_along_axis(replica, replica_at, 1).reshape(layers, num_slots)
    return ExpertPlacement(expert_of.astype(np.int32), replica_of.astype(np.int32))


def pack(weights: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs the n items of each row of `weights` [rows, n] into packs of n / `num_packs` items of about equal weight.

    The heaviest item that is left goes into the lightest pack that has room. Returns each item's pack and its place in
    it, int64 [rows, n]. With one item a pack, item i is in pack i.
    """
    rows, count = weights.shape
    room = count // num_packs
    pack_of = np.empty((rows, count), dtype=np.int64)
    place_of = np.empty((rows, count), dtype=np.int64)
    if room == 1:
        pack_of[:], place_of[:] = np.arange(count), 0
        return pack_of, place_of
    order = np.argsort(-weights, axis=1, kind="stable")
    every = np.arange(rows)
    filled = np.zeros((rows, num_packs), dtype=np.int64)
    totals = np.zeros((rows, num_packs))
    # A full pack weighs infinitely much here, so that the search for the lightest passes it over.
    open_totals = np.zeros((rows, num_packs))
    for item in order.T:
        chosen = open_totals.argmin(1)
        pack_of[every, item], place_of[every, item] = chosen, filled[every, chosen]
        filled[every, chosen] += 1
        totals[every, chosen] += weights[every, item]
        open_totals[every, chosen] = np.where(filled[every, chosen] < room, totals[every, chosen], np.inf)
    return pack_of, place_of


def replicate(loads: np.ndarray, num_replicas: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives each of the n experts of a row of `loads` [rows, n] one replica, and each further one to the hottest.

    Returns the expert of each replica and which of its expert's it is, int64 [rows, num_replicas], and the number of
    replicas of each expert, int64 [rows, n].
    """
    rows, experts = loads.shape
    expert_of = np.empty((rows, num_replicas), dtype=np.int64)
    replica_of = np.zeros((rows, num_replicas), dtype=np.int64)
    expert_of[:, :experts] = np.arange(experts)
    counts = np.ones((rows, experts), dtype=np.int64)
    every = np.arange(rows)
    for replica in range(experts, num_replicas):
        hottest = (loads / counts).argmax(1)
        expert_of[:, replica], replica_of[:, replica] = hottest, counts[every, hottest]
        counts[every, hottest] += 1
    return expert_of, replica_of, counts
