"""Measures what the models of the table of families have, of which docs/reference/architectures.md is made.

`python -m tests.models.native` writes docs/data/families.tsv: architecture, traits, ranks, what it is compared with.
Models are built without memory, from the configurations of the tests' tiny checkpoints.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.latent import IndexSpec, LatentSpec
from frame.core.interfaces.mesh import Mesh
from frame.core.interfaces.model import Model
from frame.core.layers.build import Build
from frame.core.layers.experts import experts_of
from frame.core.plugin_host.registry import Registry
from frame.layout.check import sketch
from frame.plugins.models.families import FAMILIES as TABLE
from frame.testing.encoder_decoders import ENCODER_DECODER_FAMILIES
from frame.testing.families import FAMILIES, TINY
from frame.testing.pooling_checkpoints import POOLING_FAMILIES

TABLES = (FAMILIES, POOLING_FAMILIES, ENCODER_DECODER_FAMILIES)
FILE = Path(__file__).parents[2] / "docs" / "data" / "families.tsv"
#: Families that transformers has no class of, which tests/models/test_own_references.py compares.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "ExaoneForCausalLM": {
        **{key: value for key, value in TINY.items() if key != "num_hidden_layers"},
        "model_type": "exaone", "num_layers": 3, "layer_norm_epsilon": 1e-5, "activation_function": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "BaichuanForCausalLM": {
        **{key: value for key, value in TINY.items() if key not in ("head_dim", "num_key_value_heads")},
        "model_type": "baichuan", "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "MiniCPMForCausalLM": {
        **TINY, "model_type": "minicpm", "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16,
    },
}  # fmt: skip
#: Classes that the table of causal models of transformers lacks, with a configuration; tests/models compare them, too.
_CLASSES: Mapping[str, Mapping[str, Any]] = {
    "Mistral4ForCausalLM": {**FAMILIES["deepseek-v3"].config, "model_type": "mistral4"},
}
#: What the attention of a layer reads.
_KINDS = {
    "decoder": "attention", "encoder": "attention to both sides", "encoder_only": "attention to both sides",
    "cross": "attention to an encoder",
}  # fmt: skip
#: Models of more than text, whose text part is another architecture's.
_PARTS = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
}
#: Classes of modules, of torch's, frame's and the families' own, → the trait that they are.
_MODULES = {
    "LayerNorm": "LayerNorm", "RotaryEmbedding": "rotary", "LearnedPositions": "learned positions",
    "SinePositions": "sines", "PlainMLP": "no gate", "ParallelLayer": "parallel parts",
    "SandwichLayer": "norms behind parts", "SharingAttention": "shared keys and values",
}  # fmt: skip


def measured() -> str:
    """The content of the file."""
    return "".join("\t".join(row) + "\n" for row in _rows())


def _rows() -> Iterator[tuple[str, str, str, str]]:
    homes = {name: home if ":" in home else name for rows in TABLE.values() for name, (home, _) in rows.items()}
    known = {name: _configs(name) for name in homes}
    for name in homes:
        same = _same(name, homes, known)
        traits, ranks = dict[str, None](), set[str]()
        for values in known[same]:
            found, divided = _look({**values, "architectures": [same]})
            traits |= dict.fromkeys(found)
            ranks |= divided
        ordered = [rank for rank in ("tensor", "pipeline", "experts") if rank in ranks]
        yield name, ", ".join(traits), ", ".join(ordered), _compared(name, same)


def _same(name: str, homes: Mapping[str, str], known: Mapping[str, Any]) -> str:
    """The architecture whose checkpoints show the model of `name`: itself, what it is a part of, or a synonym."""
    part = name.replace("ForConditionalGeneration", "ForCausalLM")
    alike = [one for one in homes if homes[one].rpartition(":")[2] == homes[name].rpartition(":")[2]]
    return next(one for one in (name, part, *alike, _PARTS.get(name)) if known.get(one or ""))


def _configs(name: str) -> list[Mapping[str, Any]]:
    from transformers import AutoConfig

    rows = [row for table in TABLES for row in table.values() if row.architecture == name]
    made = [json.loads(AutoConfig.for_model(row.model_type, **row.config).to_json_string()) for row in rows]
    return [*made, *(table[name] for table in (_OWN, _CLASSES) if name in table)]


def _compared(name: str, same: str) -> str:
    if same in _OWN:
        how = "a reference in float32"
    elif same in _CLASSES:
        how = "transformers, its class alone"
    else:
        rows = [row for table in TABLES for row in table.values() if row.architecture == same]
        how = f"transformers, {len(rows)} checkpoint{'s' if len(rows) > 1 else ''}"
    return how if name == same else f"as {same}"


def _look(values: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """(traits, ways of dividing it) of the model of a configuration."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        config, registry = from_flat({"model": folder}), Registry.load()
        checkpoint = read_checkpoint(config)
        model, build = sketch(config, checkpoint, registry, Mesh(), Build)
        ranks = {"experts"} if experts_of(model) else set[str]()
        ranks |= {"pipeline"} if model.stage_tensors else set()
        sketch(config, checkpoint, registry, Mesh(tensor=2), Build)
        attention = [*_attention(build)]
        parts = [part for part in _parts(model) if part != "head norms" or "latent attention" not in attention]
        return [*attention, *parts], {*ranks, "tensor"}


def _attention(build: Build) -> Iterator[str]:
    for layer in build.caches.values():
        match layer.backend_spec:
            case LatentSpec():
                yield "latent attention"
            case IndexSpec():
                yield "sparse attention"
            case AttentionSpec() as spec:
                yield _KINDS[spec.kind]
                for trait, has in (
                    ("windows", spec.window), ("chunks", spec.chunk), ("soft caps", spec.soft_cap),
                    ("sinks", spec.sinks), ("ALiBi", spec.alibi),
                    ("biases by distance", spec.distances),
                ):  # fmt: skip
                    if has:
                        yield trait
            case _:
                yield "states"


def _parts(model: Model) -> Iterator[str]:
    if experts_of(model):
        yield "routed experts"
    for module in model.modules():
        if trait := _MODULES.get(type(module).__name__):
            yield trait
        if isinstance(getattr(module, "query_norm", None), nn.Module):
            yield "head norms"


if __name__ == "__main__":
    FILE.write_text(measured(), encoding="utf-8")
