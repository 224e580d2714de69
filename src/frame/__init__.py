"""frame: LLM inference and serving whose every replaceable part is a plugin.

The imports below are the list of public names; each is done on first use, so `import frame` is quick and without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lazy import lazy_names
from .vllm_names.modules import install as _install_vllm_names

if TYPE_CHECKING:
    __version__: str
    from .core.front.logprobs import Logprob as Logprob
    from .core.front.outputs import (
        CompletionOutput as CompletionOutput,
        PoolingOutput as PoolingOutput,
        PoolingRequestOutput as PoolingRequestOutput,
        RequestOutput as RequestOutput,
    )
    from .core.interfaces.pooling_params import PoolingParams as PoolingParams
    from .core.interfaces.provider import API_VERSION as API_VERSION, Provider as Provider
    from .core.interfaces.sampling import (
        RequestOutputKind as RequestOutputKind,
        SamplingParams as SamplingParams,
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from .core.plugin_host.kinds import hookimpl as hookimpl
    from .core.plugin_host.model_registry import ModelRegistry as ModelRegistry
    from .offline.async_llm import AsyncLLM as AsyncLLM, AsyncLLMEngine as AsyncLLMEngine
    from .offline.beam import BeamSearchParams as BeamSearchParams
    from .offline.engine import LLMEngine as LLMEngine
    from .offline.llm import LLM as LLM
    from .offline.lora import LoRARequest as LoRARequest
    from .offline.pooled_outputs import (
        ClassificationOutput as ClassificationOutput,
        ClassificationRequestOutput as ClassificationRequestOutput,
        EmbeddingOutput as EmbeddingOutput,
        EmbeddingRequestOutput as EmbeddingRequestOutput,
        ScoringOutput as ScoringOutput,
        ScoringRequestOutput as ScoringRequestOutput,
    )
    from .offline.prompts import (
        EmbedsPrompt as EmbedsPrompt,
        EncoderDecoderPrompt as EncoderDecoderPrompt,
        PromptType as PromptType,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
    )
    from .offline.streaming_input import StreamingInput as StreamingInput
    from .vllm_names.engine_args import AsyncEngineArgs as AsyncEngineArgs, EngineArgs as EngineArgs

#: Modules that are attributes of `frame` without an import of their own.
_MODULES = ("interfaces", "kernels", "layers", "ops", "plugins", "settings", "testing")
_install_vllm_names()
_find, _, _names = lazy_names(__name__, _MODULES)
__all__ = sorted((*_names, "__version__"))  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # a type checker that saw it would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version("frame-llm")
        return _find(name)


def __dir__() -> list[str]:
    return __all__
