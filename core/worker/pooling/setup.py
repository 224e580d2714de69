"""Puts a worker's pooling together: the poolers that the model needs, and what the engine may then be asked."""

from __future__ import annotations

from ...config.pooling import PoolingPlan
from ...config.tree import FrameConfig
from ...interfaces.model import Model
from ...interfaces.platform import Platform
from ...interfaces.pooling import Pooler
from ...interfaces.pooling_params import PoolingFacts, PoolingTask
from ...interfaces.setup import PoolerSetup
from ...plugin_host.registry import Registry
from .dense import DenseLayers
from .pooling import PooledHead, Pooling


def make_pooling(
    config: FrameConfig, plan: PoolingPlan, model: Model, registry: Registry, platform: Platform
) -> Pooling:
    """The collaborator of a pooling model; raises `ValueError` for what the model cannot do."""
    if plan.purpose != "embed" and model.output == "hidden":
        raise ValueError(
            f"{type(model).__name__} has no output head, so it cannot {plan.purpose}; there is: convert 'embed'"
        )
    setup = PoolerSetup(
        num_slots=config.scheduler.max_num_seqs,
        hidden_size=int(model.config.hidden_size),
        device=platform.device,
        ops=platform.ops(),
        stage=platform.streams().stage,
        step_tag_id=config.pooler.step_tag_id,
    )
    poolers: dict[bool, Pooler] = {}
    for name in (plan.pooler or model.default_pooler, "all"):  # "all" is left out where the first gives token rows, too
        pooler: Pooler = registry.make("pooler", name, setup, config)
        poolers.setdefault(pooler.per_token, pooler)
    dense = DenseLayers(plan.dense, setup.hidden_size, registry, platform.device)
    head = PooledHead(
        model=model,
        ops=setup.ops,
        kind="embedding" if plan.purpose == "embed" else "scores",
        normalize=plan.normalize,
        dimensions=_dimensions(config, plan, dense.size),
        use_activation=plan.use_activation,
        activation=plan.activation,
        bias=config.pooler.pooler_logit_bias,
        returned=tuple(config.pooler.returned_token_ids or ()),
        dense=dense,
    )
    return Pooling(_facts(plan, dense.size, model, poolers, head), poolers, head, platform.streams())


def _dimensions(config: FrameConfig, plan: PoolingPlan, size: int) -> int | None:
    wanted = config.pooler.dimensions
    if wanted is None:
        return None
    if wanted > size or (plan.matryoshka and wanted not in plan.matryoshka):
        choices = ", ".join(map(str, plan.matryoshka)) or f"1 to {size}"
        raise ValueError(f"dimensions {wanted} cannot be had of this model; there are: {choices}")
    return wanted


def _facts(plan: PoolingPlan, size: int, model: Model, poolers: dict[bool, Pooler], head: PooledHead) -> PoolingFacts:
    sequence = poolers.get(False)
    embeds = head.kind == "embedding"
    tasks: list[PoolingTask] = []
    if sequence is not None:
        tasks += ["embed"] if embeds else ["classify"]
        if not embeds and plan.num_labels == 1:
            tasks.append("score")
    tasks += ["token_embed"] if embeds else ["token_classify", "reward"]
    num_scores = len(head.returned) or plan.num_labels
    return PoolingFacts(
        tasks=[*tasks, "encode"],
        size=(head.dimensions or size) if embeds else num_scores,
        labels=[] if embeds else list(plan.labels),
        normalize=plan.normalize,
        use_activation=plan.use_activation,
        dimensions=head.dimensions,
        matryoshka=plan.is_matryoshka,
        embedding_sizes=list(plan.matryoshka),
        cached_sequence=sequence is not None and not sequence.needs_every_token,
        cached_tokens=not poolers[True].needs_every_token,
        segments=model.segments,
        pooler=type(sequence or poolers[True]).__name__.removesuffix("Pooler").lower(),
    )
