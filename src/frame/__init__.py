"""frame: LLM inference and serving whose every replaceable part is a plugin.

The public names. Each is imported on first use, so `import frame` is quick and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.config.arguments import AsyncEngineArgs as AsyncEngineArgs
    from .core.config.arguments import EngineArgs as EngineArgs
    from .core.front.beam import BeamSearchParams as BeamSearchParams
    from .core.front.llm import LLM as LLM
    from .core.front.llm_engine import LLMEngine as LLMEngine
    from .core.front.logprobs import Logprob as Logprob
    from .core.front.outputs import CompletionOutput as CompletionOutput
    from .core.front.outputs import RequestOutput as RequestOutput
    from .core.front.pooled_outputs import ClassificationOutput as ClassificationOutput
    from .core.front.pooled_outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from .core.front.pooled_outputs import EmbeddingOutput as EmbeddingOutput
    from .core.front.pooled_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .core.front.pooled_outputs import PoolingOutput as PoolingOutput
    from .core.front.pooled_outputs import PoolingRequestOutput as PoolingRequestOutput
    from .core.front.pooled_outputs import ScoringOutput as ScoringOutput
    from .core.front.pooled_outputs import ScoringRequestOutput as ScoringRequestOutput
    from .core.front.prompts import PromptType as PromptType
    from .core.front.prompts import TextPrompt as TextPrompt
    from .core.front.prompts import TokensPrompt as TokensPrompt
    from .core.hookspecs import hookimpl as hookimpl
    from .core.interfaces.pooling_params import PoolingParams as PoolingParams
    from .core.interfaces.provider import API_VERSION as API_VERSION
    from .core.interfaces.provider import Provider as Provider
    from .core.interfaces.sampling import RequestOutputKind as RequestOutputKind
    from .core.interfaces.sampling import SamplingParams as SamplingParams
    from .core.interfaces.sampling import StructuredOutputsParams as StructuredOutputsParams
    from .core.registry import ModelRegistry as ModelRegistry

_HOMES = {
    "hookspecs": ("hookimpl",),
    "interfaces.provider": ("API_VERSION", "Provider"),
    "interfaces.sampling": ("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
    "config.arguments": ("AsyncEngineArgs", "EngineArgs"),
    "registry": ("ModelRegistry",),
    "front.llm": ("LLM",),
    "front.llm_engine": ("LLMEngine",),
    "front.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "front.beam": ("BeamSearchParams",),
    "front.logprobs": ("Logprob",),
    "front.outputs": ("CompletionOutput", "RequestOutput"),
    "front.pooled_outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "interfaces.pooling_params": ("PoolingParams",),
    "front.prompts": ("PromptType", "TextPrompt", "TokensPrompt"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
#: Modules that are attributes of `frame` without an import of their own.
_MODULES = frozenset(("interfaces", "kernels", "layers", "ops", "plugins", "testing"))

__all__ = sorted((*_HOME, "__version__"))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("frame-llm")
    if name in _HOME:
        return getattr(import_module(f".core.{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
