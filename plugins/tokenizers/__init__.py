"""The default tokenizer."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_tokenizers() -> list[Provider]:
    """Tokenizers in the files of Hugging Face's libraries."""
    return [
        Provider(
            "hf",
            "frame.plugins.tokenizers.hf:HfTokenizer",
            api=">=0.2.dev19,<0.3",
            summary="tokenizers that the transformers library reads (tokenizer.json, tokenizer.model, …)",
            aliases=("fast",),
        )
    ]
