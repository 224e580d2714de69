"""The default HTTP routes."""

from __future__ import annotations

from frame import Provider, hookimpl

_HERE = "frame.plugins.endpoints"
_BATCHES = "frame.plugins.batches.endpoint"
#: Name, class, summary, and the class of its options where it has any.
_ENDPOINTS: tuple[tuple[str, ...], ...] = (
    ("server", f"{_HERE}.server:ServerEndpoint", "health, version, metrics"),
    ("page", f"{_HERE}.page:PageEndpoint", "chat and live view in the browser"),
    ("models", f"{_HERE}.models:ModelsEndpoint", "OpenAI: list of models"),
    ("completions", f"{_HERE}.completions:CompletionsEndpoint", "OpenAI: text"),
    ("chat-completions", f"{_HERE}.chat:ChatEndpoint", "OpenAI: chat"),
    ("messages", f"{_HERE}.messages:MessagesEndpoint", "Anthropic: messages"),
    ("responses", f"{_HERE}.responses:ResponsesEndpoint", "OpenAI: responses", f"{_HERE}.responses:ResponsesOptions"),
    ("embeddings", f"{_HERE}.embeddings:EmbeddingsEndpoint", "OpenAI: embeddings"),
    ("pooling", f"{_HERE}.pooling:PoolingEndpoint", "pool and classify"),
    ("score", f"{_HERE}.score:ScoreEndpoint", "score pairs; rerank (Jina, Cohere)"),
    ("batches", f"{_BATCHES}:BatchesEndpoint", "OpenAI: files and batches", f"{_BATCHES}:BatchesOptions"),
    ("invocations", f"{_HERE}.invocations:InvocationsEndpoint", "SageMaker: any of these"),
    ("admin", f"{_HERE}.admin:AdminEndpoint", "pause, sleep, reset, shut down"),
    ("workers", f"{_HERE}.workers:WorkersEndpoint", "calls of worker methods"),
    ("weights", f"{_HERE}.weights:WeightsEndpoint", "other weights"),
    ("adapters", f"{_HERE}.adapters:AdaptersEndpoint", "loads and unloads adapters"),
    ("generate", f"{_HERE}.generate:GenerateEndpoint", "token ids in and out"),
    ("tokens", f"{_HERE}.tokens:TokensEndpoint", "tokenize and detokenize"),
)


@hookimpl
def frame_endpoints() -> list[Provider]:
    """The routes of OpenAI, Anthropic, vLLM, Jina and Cohere, and those of operators."""
    return [
        Provider(name, target, api=">=0.2.dev1,<0.3", summary=summary, options=next(iter(options), None))
        for name, target, summary, *options in _ENDPOINTS
    ]
