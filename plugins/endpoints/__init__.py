"""The default HTTP routes."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_endpoints() -> list[Provider]:
    """OpenAI's routes, the tokenizer's and the operator's."""
    here = "frame.plugins.endpoints"
    return [
        Provider("server", f"{here}.server:ServerEndpoint", api=">=0.2.dev1,<0.3", summary="health, version, metrics"),
        Provider(
            "page", f"{here}.page:PageEndpoint", api=">=0.2.dev1,<0.3", summary="chat and live view in the browser"
        ),
        Provider("models", f"{here}.models:ModelsEndpoint", api=">=0.2.dev1,<0.3", summary="OpenAI: list of models"),
        Provider(
            "completions", f"{here}.completions:CompletionsEndpoint", api=">=0.2.dev1,<0.3", summary="OpenAI: text"
        ),
        Provider("chat-completions", f"{here}.chat:ChatEndpoint", api=">=0.2.dev1,<0.3", summary="OpenAI: chat"),
        Provider("messages", f"{here}.messages:MessagesEndpoint", api=">=0.2.dev1,<0.3", summary="Anthropic: messages"),
        Provider(
            "responses",
            f"{here}.responses:ResponsesEndpoint",
            api=">=0.2.dev1,<0.3",
            summary="OpenAI: responses",
            options=f"{here}.responses:ResponsesOptions",
        ),
        Provider(
            "embeddings", f"{here}.embeddings:EmbeddingsEndpoint", api=">=0.2.dev1,<0.3", summary="OpenAI: embeddings"
        ),
        Provider("pooling", f"{here}.pooling:PoolingEndpoint", api=">=0.2.dev1,<0.3", summary="pool and classify"),
        Provider(
            "score", f"{here}.score:ScoreEndpoint", api=">=0.2.dev1,<0.3", summary="score pairs; rerank (Jina, Cohere)"
        ),
        Provider(
            "batches",
            "frame.plugins.batches.endpoint:BatchesEndpoint",
            api=">=0.2.dev1,<0.3",
            summary="OpenAI: files and batches",
            options="frame.plugins.batches.endpoint:BatchesOptions",
        ),
        Provider(
            "invocations",
            f"{here}.invocations:InvocationsEndpoint",
            api=">=0.2.dev1,<0.3",
            summary="SageMaker: any of these",
        ),
        Provider(
            "admin", f"{here}.admin:AdminEndpoint", api=">=0.2.dev1,<0.3", summary="pause, sleep, reset, shut down"
        ),
        Provider(
            "workers", f"{here}.workers:WorkersEndpoint", api=">=0.2.dev1,<0.3", summary="calls of worker methods"
        ),
        Provider(
            "weights", f"{here}.weights:WeightsEndpoint", api=">=0.2.dev1,<0.3", summary="other weights; adapters"
        ),
        Provider(
            "generate", f"{here}.generate:GenerateEndpoint", api=">=0.2.dev1,<0.3", summary="token ids in and out"
        ),
        Provider("tokens", f"{here}.tokens:TokensEndpoint", api=">=0.2.dev1,<0.3", summary="tokenize and detokenize"),
    ]
