"""The setups with which plugins are built: `Class(setup, options)`.

`setup` is the frozen data class of the plugin's kind, `options` the provider's own pydantic model or None. Later
versions may add fields, which breaks no constructor. Anything else that a plugin must know is an option of its own.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .mesh import Mesh, Nodes, Placement

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor

    from ..layers.build import Build
    from ..ops import Ops
    from .collectives import Groups
    from .executor import WorkerFactory
    from .experts import ExchangeSpec
    from .grammar import Vocabulary
    from .kv import KVLayout, KVRole
    from .latent import CacheSpec
    from .model import Model
    from .platform import Memory, Streams
    from .quantization import QuantizationSpec, StoredTensor
    from .serving import Serving


@dataclass(frozen=True)
class Setup:
    """What every plugin is given. Balancers, sinks, commands and route policies are given nothing else.

    `plugin` is the plugin's own full name, "package:name", for its messages.
    """

    plugin: str = field(default="", kw_only=True)


@dataclass(frozen=True, kw_only=True)
class EngineSetup(Setup):
    """Facts of the engine. Scheduling policies are given nothing else.

    A step has at most `max_num_seqs` rows and `max_num_batched_tokens` tokens; a request has at most `max_model_len`
    tokens, prompt and output. With `deterministic` every request gets equal bits in any batch. `seed` is the engine's,
    0 to 2**64 - 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    deterministic: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class PlatformSetup(EngineSetup):
    """For `Platform`, in each worker.

    With `enforce_eager` no step may be captured. `shares_prefixes`: steps may read a prefix that rows share once for
    many of them. `num_threads`: threads that the host may compute with; None for as many as suit the platform.
    `serves_adapters`: steps may be `adapted`. Engines whose workers have the same `steps_key` have the same steps;
    empty where that is not known.
    """

    placement: Placement
    enforce_eager: bool = False
    shares_prefixes: bool = False
    num_threads: int | None = None
    serves_adapters: bool = False
    steps_key: str = ""


@dataclass(frozen=True, kw_only=True)
class ExecutorSetup(EngineSetup):
    """For `Executor`: the workers of one engine, made by `workers`, one for each of `placements`, in order of rank.

    The placements are those of one machine; an executor of several `nodes` says where each is itself. The parent of an
    engine ends it when no step ends within `hang_seconds`.
    """

    mesh: Mesh
    placements: Sequence[Placement]
    workers: WorkerFactory
    hang_seconds: float
    nodes: Nodes = field(default_factory=Nodes)


@dataclass(frozen=True, kw_only=True)
class ConnectorSetup(EngineSetup):
    """For `ConnectorScheduler`: the layout of the KV cache, which all workers of `mesh` have.

    This engine has `mesh.engine_size` workers; their ranks among these, from 0 on, number what `connect` is given, and
    are `ConnectorWorker.rank`. Engines that share experts have one mesh, whose workers are `mesh.size`. `role` says
    whether this engine loads blocks, saves them, or both. `engine_id` names it among engines that exchange blocks; no
    other engine has or had that name. Of several engines beside one another each has a `data_rank`, from which those of
    one machine tell their ports. `address` is this machine's for engines that it exchanges blocks with.
    `make(kind, name, setup, options, part)` builds another plugin, with the options that the user set for it and, over
    them, `options`; `part` is the tag of what is to be built of it, as "worker". Both may be left out.
    """

    layout: KVLayout
    role: KVRole
    engine_id: str
    mesh: Mesh
    data_rank: int = 0
    address: str = "127.0.0.1"
    make: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ConnectorWorkerSetup(ConnectorSetup):
    """For `ConnectorWorker`: the device's queue and memory, and which worker this is."""

    placement: Placement
    streams: Streams
    memory: Memory


@dataclass(frozen=True)
class WorkerExtensionSetup(Setup):
    """For `WorkerExtension`, once per worker: which one it is, its model with weights and cache, device and queue."""

    placement: Placement
    model: Model
    device: torch.device
    streams: Streams


@dataclass(frozen=True)
class BackendSetup(Setup):
    """For `CacheBackend`, once per KV group: what its layers need, and the platform's ops."""

    spec: CacheSpec
    ops: Ops


@dataclass(frozen=True)
class ExchangeSetup(Setup):
    """For `ExpertExchange`: what layers ask of it, and the worker's groups, where `expert` merges `data`, `tensor`."""

    spec: ExchangeSpec
    groups: Groups


@dataclass(frozen=True)
class QuantizationSetup(Setup):
    """For `Quantization`, once per model: where it computes, and what the checkpoint says of its weights.

    Without `quantization_config` the weights are to be quantised while they load. `tensors` are the type and shape of
    each tensor of the checkpoint, by the name that layers know it by; there is none where weights are made up.
    `renames` are the model's: (pattern, replacement) pairs from names in files to these names.
    """

    spec: QuantizationSpec
    quantization_config: Mapping[str, Any] | None = None
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    renames: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class AdapterSetup(Setup):
    """For `Adapters`, once per worker: the most adapters of a step, their highest rank, and the most tokens of a step.

    With `fully_sharded` the ranks that divide a layer by its outputs divide the inner rank of adapters, too.
    `renames` are those of the model; `base_model` is its name, for a warning about adapters of another one. Where
    `weights_move`, parameters of layers are laid into other memory once the layers are made.
    """

    max_adapters: int
    max_rank: int
    max_num_tokens: int
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    fully_sharded: bool = False
    renames: Sequence[tuple[str, str]] = ()
    base_model: str = ""
    weights_move: bool = False


@dataclass(frozen=True)
class AdapterResolverSetup(Setup):
    """For `AdapterResolver`, in each API process: the first name of the model that is served."""

    base_model: str = ""


@dataclass(frozen=True)
class ModelSetup(Setup):
    """For `Model`: `build` has the checkpoint's configuration and makes the layers."""

    build: Build


@dataclass(frozen=True)
class SourceSetup(Setup):
    """For `ModelSource`: the folder to keep models in, None for the source's own choice; `offline` forbids fetching."""

    download_dir: str | None = None
    offline: bool = False


@dataclass(frozen=True)
class LoaderSetup(Setup):
    """For `WeightLoader`: the checkpoint's folder, whether `--load-format` names this loader, the engine's seed.

    `strategy` is `--safetensors-load-strategy`.
    """

    folder: Path
    named: bool = False
    seed: int = 0
    strategy: str = "lazy"


@dataclass(frozen=True)
class TokenizerSetup(Setup):
    """For `Tokenizer`: the folder with its files."""

    folder: Path


@dataclass(frozen=True)
class SpeculatorSetup(Setup):
    """For `Speculator`, once per worker: the most tokens that it may guess for a row, the ops, the device."""

    num_drafts: int
    ops: Ops
    device: torch.device


@dataclass(frozen=True)
class ProcessorSetup(Setup):
    """For logits processors, once per worker: the device of the logits, and the most rows of a step."""

    device: torch.device
    max_num_seqs: int


@dataclass(frozen=True)
class PoolerSetup(Setup):
    """For `Pooler`, once per worker: the number of slots, the length of a hidden state, the device and its ops.

    `stage` copies a host array to the device without waiting. `step_tag_id` is the token that ends each step of
    reasoning, for poolers that score steps; None where none is set.
    """

    num_slots: int
    hidden_size: int
    device: torch.device
    ops: Ops
    stage: Callable[[np.ndarray], Tensor]
    step_tag_id: int | None = None


@dataclass(frozen=True)
class GrammarSetup(Setup):
    """For `GrammarBackend`: the vocabulary, and what JSON may be where a request does not say.

    `disable_any_whitespace`: it has no white space between its parts; `any_whitespace`: any, up to a bound.
    `disable_additional_properties`: objects have only the properties that the schema names.
    """

    vocabulary: Vocabulary
    disable_any_whitespace: bool = False
    any_whitespace: bool = False
    disable_additional_properties: bool = False


@dataclass(frozen=True)
class ParserSetup(Setup):
    """For tool and reasoning parsers, in each API process.

    `render(messages, **options)` is the checkpoint's chat template (`tools`, `add_generation_prompt`, …), raising
    `ValueError`; None when there is none.
    """

    render: Callable[..., str] | None = None


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """The settings of the HTTP server that shape answers; `frame serve --help` explains each under its name."""

    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_tokenizer_info_endpoint: bool = False
    page: bool = True
    tool_server: tuple[str, ...] = ()
    rpc_methods: tuple[str, ...] = ()
    weights_root: str | None = None
    max_upload_bytes: int = 100 << 20
    vllm_metrics: bool = False


@dataclass(frozen=True)
class EndpointSetup(Setup):
    """For `Endpoint`, in each API process: what the server offers, and those of its settings that shape answers."""

    serving: Serving
    settings: EndpointSettings = EndpointSettings()
