"""The default weight loaders."""

from __future__ import annotations

from frame import Provider, hookimpl

_HERE = "frame.plugins.loaders"
_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_weight_loaders() -> list[Provider]:
    """Safetensors and GGUF files, and random weights on request."""
    return [
        Provider(
            "safetensors",
            f"{_HERE}.safetensors:SafetensorsLoader",
            api=_API,
            summary="safetensors files, single or sharded, mapped and read once",
            preference=10,
        ),
        Provider(
            "gguf", "frame.plugins.gguf.loader:GgufLoader", api=_API, summary="GGUF files, one model in one or several"
        ),
        Provider(
            "mistral",
            f"{_HERE}.mistral:MistralLoader",
            api=_API,
            summary="params.json and consolidated*.safetensors, as Mistral's own tools read them",
            preference=20,
        ),
        Provider(
            "sharded_state",
            f"{_HERE}.sharded_state:ShardedStateLoader",
            api=_API,
            summary="the weights of each rank as they are once loaded, which LLM.save_sharded_state stores",
            preference=30,
        ),
        *(
            Provider(name, f"{_HERE}.streamed:{target}", api=_API, summary=summary, preference=-10)
            for name, target, summary in (
                ("fastsafetensors", "FastSafetensorsLoader", "safetensors files, read by the package fastsafetensors"),
                ("runai_streamer", "RunaiLoader", "safetensors files, read by the package runai-model-streamer"),
                ("tensorizer", "TensorizerLoader", "model.tensors, read by the package tensorizer"),
            )
        ),
        Provider(
            "pt",
            f"{_HERE}.pickles:PickleLoader",
            api=_API,
            summary="refuses pickles (.bin, .pt) and npcache, with the command that converts them",
            preference=-20,
            aliases=("npcache",),
        ),
        Provider("dummy", f"{_HERE}.dummy:DummyLoader", api=_API, summary="small random weights, no file read"),
    ]
