"""What balances the experts of a worker's model, as its settings say. Knows no request."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.balancer import ExpertBalancer, SlotShape
from frame.core.interfaces.experts import RouterSpec
from frame.core.interfaces.load_trace import LoadTraceWriter, TraceHeader
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.setup import Setup
from frame.core.layers.expert_map import ExpertMaps
from frame.core.layers.experts import Experts, experts_of
from frame.core.worker.start.open_device import OpenDevice

from .balance import ExpertBalance
from .null import NoBalance


def make_balance(opened: OpenDevice, model: nn.Module, maps: ExpertMaps | None) -> NoBalance:
    """What balances the experts behind `maps`; all workers that share experts must call this at the same time."""
    if maps is None:
        return NoBalance()
    config, placement, groups = opened.config.expert_balance, opened.placement, opened.groups
    layers = [layer for layer in experts_of(model) if layer.map is not None]
    rows = [layer.method.rows(layer) for layer in layers]
    shape = _shape(opened, model, layers[0])
    group = opened.collectives.group("expert.balance", placement.mesh.ranks("expert", placement.rank))
    streams = opened.platform.streams()
    recording = config.eplb_record is not None and group.rank == 0
    return ExpertBalance(
        maps,
        rows,
        group,
        shape,
        _balancer(opened),
        streams,
        window=config.eplb_window_size,
        interval=config.eplb_step_interval,
        rows_per_step=config.eplb_rows_per_step,
        at_once=not config.eplb_use_async,
        queue=streams.side_queue() if config.eplb_use_async else None,
        counts=groups.tensor.rank == 0,
        logs=config.eplb_log_balancedness,
        record=_trace(opened.config, placement, maps, shape) if recording else None,
    )


def _balancer(opened: OpenDevice) -> ExpertBalancer:
    provider = opened.registry.select("balancer", opened.config.expert_balance.expert_balancer, lambda kind: None)
    made: ExpertBalancer = opened.registry.make("balancer", provider, Setup(), opened.config)
    return made


def _shape(opened: OpenDevice, model: nn.Module, layer: Experts) -> SlotShape:
    mesh, ranks = opened.placement.mesh, opened.groups.expert.size
    nodes = opened.config.executor.nnodes
    specs = (getattr(module, "spec", None) for module in model.modules())
    groups = next((spec.num_groups for spec in specs if isinstance(spec, RouterSpec)), 1)
    rows = layer.method.rows(layer)
    return SlotShape(
        num_slots=layer.num_all_slots,
        num_ranks=ranks,
        num_nodes=nodes if mesh.pipeline == 1 and ranks % nodes == 0 else 1,
        num_groups=groups,
        expert_bytes=sum(row.nbytes for row in rows) // layer.num_slots,
    )


def _trace(config: FrameConfig, placement: Placement, maps: ExpertMaps, shape: SlotShape) -> LoadTraceWriter:
    """The file of the first rank that shares experts; each pipeline stage but the first adds its number to the name."""
    path = Path(config.expert_balance.eplb_record or "")
    stage = placement.mesh.index("pipeline", placement.rank)
    if stage:
        path = path.with_name(f"{path.name}.stage{stage}")
    header = TraceHeader(
        num_layers=maps.num_layers,
        num_experts=maps.num_experts,
        num_groups=shape.num_groups,
        expert_bytes=shape.expert_bytes,
    )
    try:
        return LoadTraceWriter(path, header)
    except OSError as error:
        raise ValueError(f"eplb_record {str(path)!r} cannot be written: {error.strerror}") from None
