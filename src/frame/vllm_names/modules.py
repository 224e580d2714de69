"""vLLM's module paths below `frame`, by one table: `from frame.sampling_params import SamplingParams` finds ours.

A module of the table is made when it is imported, and imports what its names stand for when they are asked for. A
name that has nothing to stand for raises an `ImportError` that says what to do instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

_NO_LORA = "adapters are settings of the engine: enable_lora, max_loras, max_lora_rank, max_cpu_loras"
_NO_MEDIA = "models take text only"
_SERVER = "run `frame serve`, or embed frame.LLM or frame.AsyncLLM"

_ENGINES = {"LLMEngine": "frame:LLMEngine"}
_ASYNC = {"AsyncLLM": "frame:AsyncLLM", "AsyncLLMEngine": "frame:AsyncLLMEngine"}
_ARGUMENTS = {"EngineArgs": "frame:EngineArgs", "AsyncEngineArgs": "frame:AsyncEngineArgs"}
_PARSER = {"FlexibleArgumentParser": "frame.settings:FlagParser"}
_REGISTRY = {"ModelRegistry": "frame:ModelRegistry"}
_PROCESSORS = {
    "LogitsProcessor": "frame.interfaces:BatchLogitsProcessor",
    "AdapterLogitsProcessor": "frame.interfaces:AdapterLogitsProcessor",
    "BatchUpdate": "frame.interfaces:BatchUpdate",
    "MoveDirectionality": "frame.interfaces:MoveDirectionality",
}
_RANKS = {
    name: f"frame.vllm_names.one_device:{name}"
    for name in (
        "cleanup_dist_env_and_memory",
        "destroy_model_parallel",
        "destroy_distributed_environment",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
    )
}
_CONFIGS = {
    name: f"frame.vllm_names.configs:{name}"
    for name in (
        "AttentionConfig", "CompilationConfig", "KVEventsConfig", "KVTransferConfig", "PoolerConfig", "ProfilerConfig",
        "SpeculativeConfig", "StructuredOutputsConfig",
    )
}  # fmt: skip
_NO_TREE = "frame has one tree of settings: frame.EngineArgs(…).create_engine_config()"
_METRICS = {name: f"frame.offline.metrics:{name}" for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")}

#: Module below `frame` → its names → "module:name" of ours, or the reason why there is none.
MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "sampling_params": {
        name: f"frame:{name}"
        for name in ("SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "BeamSearchParams")
    },
    "pooling_params": {"PoolingParams": "frame:PoolingParams"},
    "outputs": {
        name: f"frame:{name}"
        for name in (
            "CompletionOutput", "RequestOutput", "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput",
            "EmbeddingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput",
            "ScoringRequestOutput",
        )
    },
    "logprobs": {"Logprob": "frame:Logprob"},
    "inputs": {
        name: f"frame:{name}" for name in ("EmbedsPrompt", "PromptType", "StreamingInput", "TextPrompt", "TokensPrompt")
    }
    | {"ExplicitEncoderDecoderPrompt": "frame:EncoderDecoderPrompt"},
    "engine.arg_utils": _ARGUMENTS,
    "engine.protocol": {"StreamingInput": "frame:StreamingInput"},
    "engine.llm_engine": _ENGINES,
    "engine.async_llm_engine": _ASYNC,
    "v1.engine.llm_engine": _ENGINES,
    "v1.engine.async_llm": _ASYNC,
    "v1.engine.exceptions": {"EngineDeadError": "frame.core.interfaces.client:EngineDeadError"},
    "v1.metrics.reader": _METRICS,
    "v1.sample.logits_processor": _PROCESSORS,
    "v1.sample.logits_processor.interface": _PROCESSORS,
    "entrypoints.llm": {"LLM": "frame:LLM"},
    "entrypoints.openai.api_server": {"run_server": _SERVER, "build_app": _SERVER, "init_app_state": _SERVER},
    "entrypoints.openai.cli_args": {"make_arg_parser": "give an argparse parser to EngineArgs.add_cli_args"},
    "config": {**_CONFIGS, "VllmConfig": _NO_TREE, "ModelConfig": _NO_TREE, "LoRAConfig": _NO_LORA},
    "utils": {**_PARSER, "random_uuid": "frame.vllm_names.one_device:random_uuid"},
    "utils.argparse_utils": _PARSER,
    "utils.network_utils": {name: f"frame.vllm_names.one_device:{name}" for name in ("get_ip", "get_open_port")},
    "lora.request": {"LoRARequest": "frame:LoRARequest"},
    "distributed": _RANKS,
    "distributed.parallel_state": _RANKS,
    "model_executor.models": _REGISTRY,
    "model_executor.models.registry": _REGISTRY,
    "tokenizers": {"get_tokenizer": "frame.vllm_names.one_device:get_tokenizer"},
    "transformers_utils.tokenizer": {"get_tokenizer": "frame.vllm_names.one_device:get_tokenizer"},
    "platforms": {"current_platform": "ask torch.cuda.is_available(); frame chooses its platform with --platform"},
    "logger": {"init_logger": "logging:getLogger"},
    "version": {"__version__": "frame:__version__"},
    "multimodal": {"MULTIMODAL_REGISTRY": _NO_MEDIA},
    "multimodal.image": {"convert_image_mode": _NO_MEDIA},
    "assets.image": {"ImageAsset": _NO_MEDIA},
    "assets.video": {"VideoAsset": _NO_MEDIA},
    "assets.audio": {"AudioAsset": _NO_MEDIA},
})  # fmt: skip

_PACKAGES = frozenset(
    ".".join(parts[:count]) for parts in (name.split(".") for name in MODULES) for count in range(1, len(parts))
)


class _Module(ModuleType):
    """A module of the table."""

    def __getattr__(self, name: str) -> Any:
        place = self.__name__.removeprefix("frame.")
        names = MODULES.get(place, {})
        target = names.get(name)
        if target is None or name == "__path__":
            if name.startswith("__"):
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            listed = ", ".join(sorted(names)) or "modules only"
            raise ImportError(f"{self.__name__} has no {name!r} here; it has: {listed}")
        module, colon, attribute = target.partition(":")
        if not colon or " " in module:
            raise ImportError(f"{self.__name__}.{name} is not in frame: {target}")
        found = getattr(import_module(module), attribute)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted(MODULES.get(self.__name__.removeprefix("frame."), {}))


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of the table; asked only for what is no file of frame's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = fullname.removeprefix("frame.")
        if place == fullname or not (place in MODULES or place in _PACKAGES):
            return None
        return ModuleSpec(fullname, self, is_package=place in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, f"vLLM's module {spec.name.removeprefix('frame.')}, by frame's names.")

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run: names are found when they are asked for."""


def install() -> None:
    """Lets `import frame.sampling_params` and the others work; may be called again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
