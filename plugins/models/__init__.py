"""The default models, by the architecture that config.json states. Adding a family is one file here and one row."""

from __future__ import annotations

from frame import Provider, hookimpl

_FAMILIES = (("LlamaForCausalLM", "llama:LlamaForCausalLM", "Llama 1 to 3, any rope variant"),)


@hookimpl
def frame_models() -> list[Provider]:
    """One provider an architecture."""
    return [
        Provider(name, f"frame.plugins.models.{target}", api=">=0.1,<0.2", summary=summary)
        for name, target, summary in _FAMILIES
    ]
