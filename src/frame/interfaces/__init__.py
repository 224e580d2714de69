"""The contract for plugin authors: what plugins implement, and what crosses between the parts of frame.

The imports below are the list of names; each is done on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.lazy import lazy_names

if TYPE_CHECKING:
    from frame.core.interfaces.adapters import (
        AdapterLoad as AdapterLoad,
        AdapterResolver as AdapterResolver,
        Adapters as Adapters,
        AdapterSource as AdapterSource,
        NoAdapters as NoAdapters,
        ReadAdapter as ReadAdapter,
    )
    from frame.core.interfaces.attention import (
        AttentionBackend as AttentionBackend,
        AttentionSpec as AttentionSpec,
        BlockFormat as BlockFormat,
        CacheBackend as CacheBackend,
        ContextShare as ContextShare,
        GroupBatch as GroupBatch,
        LayerParams as LayerParams,
        SharedPrefix as SharedPrefix,
    )
    from frame.core.interfaces.balancer import (
        ExpertBalancer as ExpertBalancer,
        ExpertPlacement as ExpertPlacement,
        FixedPlacement as FixedPlacement,
        SlotShape as SlotShape,
        balancedness as balancedness,
    )
    from frame.core.interfaces.client import (
        EngineDeadError as EngineDeadError,
        EngineInfo as EngineInfo,
    )
    from frame.core.interfaces.collectives import (
        GATHER_SECONDS as GATHER_SECONDS,
        Collectives as Collectives,
        Groups as Groups,
        HostGroup as HostGroup,
        NoCollectives as NoCollectives,
        NormLayer as NormLayer,
        ProcessGroup as ProcessGroup,
        SingleGroup as SingleGroup,
        SingleHost as SingleHost,
        UnconnectedCollectives as UnconnectedCollectives,
        UnconnectedGroup as UnconnectedGroup,
    )
    from frame.core.interfaces.connector import (
        CacheView as CacheView,
        ConnectorScheduler as ConnectorScheduler,
        ConnectorWorker as ConnectorWorker,
        NullConnectorScheduler as NullConnectorScheduler,
        NullConnectorWorker as NullConnectorWorker,
        RequestView as RequestView,
        StateRun as StateRun,
    )
    from frame.core.interfaces.endpoint import (
        KNOWN as KNOWN,
        Command as Command,
        Endpoint as Endpoint,
    )
    from frame.core.interfaces.engine import (
        NO_TOKEN as NO_TOKEN,
        EngineOutput as EngineOutput,
        EngineRequest as EngineRequest,
        EngineStats as EngineStats,
        FinishReason as FinishReason,
        PromptEmbeds as PromptEmbeds,
    )
    from frame.core.interfaces.errors import (
        ErrorShape as ErrorShape,
        InvalidRequest as InvalidRequest,
        RequestError as RequestError,
    )
    from frame.core.interfaces.executor import (
        DeadWorkerError as DeadWorkerError,
        Executor as Executor,
        Progress as Progress,
        SpawnedTeam as SpawnedTeam,
        SpawnedWorker as SpawnedWorker,
        StepHandle as StepHandle,
        WorkerDescription as WorkerDescription,
        WorkerFactory as WorkerFactory,
        WorkerFacts as WorkerFacts,
        WorkerProtocol as WorkerProtocol,
        WorkerReady as WorkerReady,
    )
    from frame.core.interfaces.executor_team import (
        StepOutcome as StepOutcome,
        TeamExecutor as TeamExecutor,
        step_outcome as step_outcome,
    )
    from frame.core.interfaces.experts import (
        SILU as SILU,
        Activations as Activations,
        Dispatched as Dispatched,
        ExchangeSpec as ExchangeSpec,
        ExpertExchange as ExpertExchange,
        ExpertLayout as ExpertLayout,
        ExpertMatrices as ExpertMatrices,
        ExpertMethod as ExpertMethod,
        ExpertSpec as ExpertSpec,
        Gating as Gating,
        LocalExchange as LocalExchange,
        RouterSpec as RouterSpec,
        Routing as Routing,
    )
    from frame.core.interfaces.extension import (
        WorkerExtension as WorkerExtension,
    )
    from frame.core.interfaces.grammar import (
        Grammar as Grammar,
        GrammarBackend as GrammarBackend,
        GrammarMatcher as GrammarMatcher,
        Vocabulary as Vocabulary,
    )
    from frame.core.interfaces.held_memory import (
        HeldMemory as HeldMemory,
        HeldPiece as HeldPiece,
    )
    from frame.core.interfaces.kv import (
        DTYPE_BYTES as DTYPE_BYTES,
        AnyKVSpec as AnyKVSpec,
        ChunkedKV as ChunkedKV,
        CrossKV as CrossKV,
        FullKV as FullKV,
        KVGroup as KVGroup,
        KVLayout as KVLayout,
        KVSpec as KVSpec,
        LatentKV as LatentKV,
        SlidingKV as SlidingKV,
        StateKV as StateKV,
    )
    from frame.core.interfaces.kv_layout import (
        blocks_needed as blocks_needed,
        common_pools as common_pools,
        full_bytes as full_bytes,
        max_request_len as max_request_len,
        part_of as part_of,
        plan_layout as plan_layout,
        pool_bytes as pool_bytes,
        why_not_served as why_not_served,
        with_blocks as with_blocks,
        with_checkpoints as with_checkpoints,
    )
    from frame.core.interfaces.latent import (
        CacheSpec as CacheSpec,
        IndexBackend as IndexBackend,
        IndexSpec as IndexSpec,
        LatentBackend as LatentBackend,
        LatentParams as LatentParams,
        LatentSpec as LatentSpec,
    )
    from frame.core.interfaces.load_trace import (
        LoadRecord as LoadRecord,
        LoadTrace as LoadTrace,
        LoadTraceWriter as LoadTraceWriter,
        TraceHeader as TraceHeader,
    )
    from frame.core.interfaces.loader import (
        LazyTensor as LazyTensor,
        WeightLoader as WeightLoader,
    )
    from frame.core.interfaces.logits import (
        ForeignLogitsProcessor as ForeignLogitsProcessor,
        LogitsProcessor as LogitsProcessor,
    )
    from frame.core.interfaces.mesh import (
        Axis as Axis,
        Mesh as Mesh,
        Nodes as Nodes,
        Placement as Placement,
    )
    from frame.core.interfaces.model import (
        ForwardStep as ForwardStep,
        LayerHooks as LayerHooks,
        Model as Model,
        ModelInputs as ModelInputs,
        ModelOutput as ModelOutput,
        RunningStep as RunningStep,
    )
    from frame.core.interfaces.parser import (
        AssistantMessage as AssistantMessage,
        CallArguments as CallArguments,
        CallBegin as CallBegin,
        CallEnd as CallEnd,
        CallTags as CallTags,
        Content as Content,
        OutputEvent as OutputEvent,
        OutputReader as OutputReader,
        ParserRequest as ParserRequest,
        Reasoning as Reasoning,
        ReasoningParser as ReasoningParser,
        Tool as Tool,
        ToolCall as ToolCall,
        ToolParser as ToolParser,
        joined as joined,
    )
    from frame.core.interfaces.platform import (
        SMALL_COPY_BYTES as SMALL_COPY_BYTES,
        HostCopy as HostCopy,
        Mark as Mark,
        Memory as Memory,
        MemorySnapshot as MemorySnapshot,
        Platform as Platform,
        PlatformSpec as PlatformSpec,
        SideQueue as SideQueue,
        Streams as Streams,
    )
    from frame.core.interfaces.platform_steps import (
        AnyShape as AnyShape,
        Compiler as Compiler,
        EagerGraphs as EagerGraphs,
        Forward as Forward,
        Graphs as Graphs,
        Kernels as Kernels,
        Length as Length,
        Part as Part,
        Result as Result,
        Shapes as Shapes,
        Steps as Steps,
        StepShape as StepShape,
        TrialRun as TrialRun,
    )
    from frame.core.interfaces.pooling import (
        Pooler as Pooler,
        PoolerRows as PoolerRows,
    )
    from frame.core.interfaces.pooling_params import (
        PoolingFacts as PoolingFacts,
        PoolingParams as PoolingParams,
    )
    from frame.core.interfaces.provider import (
        API_VERSION as API_VERSION,
        Provider as Provider,
    )
    from frame.core.interfaces.quantization import (
        CacheQuantization as CacheQuantization,
        EmbeddingMethod as EmbeddingMethod,
        EmbeddingSpec as EmbeddingSpec,
        Gated as Gated,
        LinearMethod as LinearMethod,
        LinearSpec as LinearSpec,
        Quantization as Quantization,
        QuantizationSpec as QuantizationSpec,
        StoredTensor as StoredTensor,
        Unquantized as Unquantized,
    )
    from frame.core.interfaces.report import (
        MetricsSink as MetricsSink,
        RequestReport as RequestReport,
    )
    from frame.core.interfaces.sampling import (
        MAX_INT as MAX_INT,
        RequestOutputKind as RequestOutputKind,
        SamplingParams as SamplingParams,
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from frame.core.interfaces.scheduling import (
        Schedulable as Schedulable,
        SchedulerPolicy as SchedulerPolicy,
    )
    from frame.core.interfaces.schema import (
        MAX_TOKEN_LIST as MAX_TOKEN_LIST,
        BoundedModel as BoundedModel,
        Limits as Limits,
        Name as Name,
        SamplingFields as SamplingFields,
        Settings as Settings,
        Text as Text,
        TokenId as TokenId,
        TokenIds as TokenIds,
        at_most as at_most,
        bound_logprobs as bound_logprobs,
        few as few,
        limits_of as limits_of,
    )
    from frame.core.interfaces.serving import (
        AdapterCard as AdapterCard,
        Batches as Batches,
        EngineControl as EngineControl,
        Generation as Generation,
        Histogram as Histogram,
        HttpRequests as HttpRequests,
        RequestCounts as RequestCounts,
        RouteAnswer as RouteAnswer,
        ServedModels as ServedModels,
        Serving as Serving,
        Texts as Texts,
    )
    from frame.core.interfaces.setup import (
        AdapterResolverSetup as AdapterResolverSetup,
        AdapterSetup as AdapterSetup,
        BackendSetup as BackendSetup,
        ConnectorSetup as ConnectorSetup,
        ConnectorWorkerSetup as ConnectorWorkerSetup,
        EndpointSettings as EndpointSettings,
        EndpointSetup as EndpointSetup,
        EngineSetup as EngineSetup,
        ExchangeSetup as ExchangeSetup,
        ExecutorSetup as ExecutorSetup,
        GrammarSetup as GrammarSetup,
        LoaderSetup as LoaderSetup,
        ModelSetup as ModelSetup,
        ParserSetup as ParserSetup,
        PlatformSetup as PlatformSetup,
        PoolerSetup as PoolerSetup,
        ProcessorSetup as ProcessorSetup,
        QuantizationSetup as QuantizationSetup,
        Setup as Setup,
        SourceSetup as SourceSetup,
        SpeculatorSetup as SpeculatorSetup,
        TokenizerSetup as TokenizerSetup,
        WorkerExtensionSetup as WorkerExtensionSetup,
    )
    from frame.core.interfaces.source import (
        ModelSource as ModelSource,
    )
    from frame.core.interfaces.speculator import (
        DraftContext as DraftContext,
        Drafts as Drafts,
        Speculator as Speculator,
    )
    from frame.core.interfaces.step import (
        BlockAppend as BlockAppend,
        BlockCopy as BlockCopy,
        ExpertReport as ExpertReport,
        LogprobRows as LogprobRows,
        NewRequest as NewRequest,
        PrefixCosts as PrefixCosts,
        PrefixRows as PrefixRows,
        StepPlan as StepPlan,
        StepResult as StepResult,
        TokenMasks as TokenMasks,
        TransferReport as TransferReport,
    )
    from frame.core.interfaces.tokenizer import (
        ChatOptions as ChatOptions,
        Pieces as Pieces,
        SpecialFrame as SpecialFrame,
        Tokenizer as Tokenizer,
    )
    from frame.core.interfaces.turn import (
        Turn as Turn,
    )
    from frame.core.interfaces.wire import (
        decode as decode,
        encode as encode,
    )
    from frame.core.layers.build import (
        Build as Build,
    )
    from frame.core.worker.connected import (
        WorkerProcess as WorkerProcess,
    )
    from frame.kv_events.changes import (
        KVChange as KVChange,
        KVCleared as KVCleared,
        KVRemoved as KVRemoved,
        KVStored as KVStored,
    )
    from frame.routing.policy import (
        Ask as Ask,
        Route as Route,
        RoutePolicy as RoutePolicy,
        RouteRequest as RouteRequest,
        RouteServer as RouteServer,
        ServerRole as ServerRole,
    )
    from frame.tiers.policy import (
        TierPolicy as TierPolicy,
        TierPolicySetup as TierPolicySetup,
    )
    from frame.vllm_names.processors import (
        AdapterLogitsProcessor as AdapterLogitsProcessor,
        BatchLogitsProcessor as BatchLogitsProcessor,
        BatchUpdate as BatchUpdate,
        MoveDirectionality as MoveDirectionality,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
