"""The default model sources."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_model_sources() -> list[Provider]:
    """Hugging Face's hub, and other hubs with the same protocol; files of models in other forms."""
    return [
        Provider(
            "gguf",
            "frame.plugins.gguf.source:GgufSource",
            api=">=0.2.dev5,<0.3",
            summary="models in GGUF files: FILE.gguf, FOLDER, FOLDER:QUANT, or ORGANISATION/NAME:QUANT at a hub",
            preference=10,
        ),
        Provider(
            "mistral",
            "frame.plugins.sources.mistral:MistralSource",
            api=">=0.2.dev5,<0.3",
            summary="folders with params.json and consolidated*.safetensors",
            preference=5,
        ),
        Provider(
            "hub",
            "frame.plugins.sources.hub:HubSource",
            api=">=0.2.dev5,<0.3",
            summary="models of Hugging Face's hub, or of HF_ENDPOINT, by name (org/model)",
        ),
    ]
