"""Whether steps are recorded: which collaborators of the runner are against it. Knows no device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...interfaces.model import LayerHooks, Model
from ...interfaces.platform_steps import EagerGraphs, Graphs
from .attention_binding import PlannedLayers


def layer_reasons(planned: Iterable[PlannedLayers]) -> list[str]:
    """Why those are that plan for layers with a cache."""
    against = dict.fromkeys((one.backend is None, one.name) for one in planned if one.planner.needs_python)
    return [f"{'layer' if own else 'attention backend'} {name!r} needs Python in each step" for own, name in against]


def model_reasons(model: Model, *, pools: bool) -> list[str]:
    """Why the model is, or what it is used for: an engine that `pools` has no decode steps."""
    found = ["a pooling engine has no decodes"] if pools else []
    if model.needs_python or model.segments:
        found.append(f"model {type(model).__name__} needs Python in each step")
    return found


def hook_reasons(hooks: LayerHooks, connector: str | None) -> list[str]:
    """Why the hooks of the KV connector of that name are."""
    return [f"KV connector {connector!r} needs Python in each layer of decode steps"] if hooks.decode_steps else []


def choose_graphs(graphs: Graphs, reasons: Sequence[str]) -> Graphs:
    """`graphs`, or the null object where there is a reason: no step of padding may run there."""
    return EagerGraphs() if reasons else graphs
