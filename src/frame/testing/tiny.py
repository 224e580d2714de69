"""A tiny random checkpoint of any architecture that frame knows a family of."""

from __future__ import annotations

import json
from pathlib import Path

from .checkpoints import make_checkpoint
from .encoder_decoders import ENCODER_DECODER_FAMILIES, make_encoder_decoder
from .families import FAMILIES
from .pooling_checkpoints import POOLING_FAMILIES, make_pooling_checkpoint

_TEXT, _SEEING = "ForCausalLM", "ForConditionalGeneration"


def write_tiny(folder: Path, architecture: str) -> None:
    """Writes config.json and weights into `folder`; raises `ValueError` for an architecture without a family.

    A model that also sees gets the text model of its family, nested as such checkpoints nest it.
    """
    families: dict[str, str] = {}
    for name, row in FAMILIES.items():
        families.setdefault(row.architecture, name)
    pooling = next((name for name, row in POOLING_FAMILIES.items() if row.architecture == architecture), None)
    if pooling is not None:
        make_pooling_checkpoint(folder, pooling)
        return
    both = next((name for name, row in ENCODER_DECODER_FAMILIES.items() if row.architecture == architecture), None)
    if both is not None:
        make_encoder_decoder(folder, both)
        return
    if architecture in families:
        make_checkpoint(folder, families[architecture])
        return
    inner = architecture.replace(_SEEING, _TEXT)
    if inner not in families:
        raise ValueError(f"no tiny checkpoint of {architecture!r}; there are: {', '.join(sorted(families))}")
    make_checkpoint(folder, families[inner])
    _nest(folder, architecture)


def _nest(folder: Path, architecture: str) -> None:
    from safetensors.torch import load_file, save_file

    text = json.loads((folder / "config.json").read_text())
    nested = {
        "architectures": [architecture],
        "model_type": str(text["model_type"]).removesuffix("_text"),
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
    }
    (folder / "config.json").write_text(json.dumps(nested))
    weights = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
