"""Reads the checkpoints that Mistral publishes for its own tools: `params.json` and `consolidated*.safetensors`.

Queries and keys in them are made for interleaved rotary positions; their rows are put into the order of others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from frame.interfaces import LazyTensor

from .rope_rows import HalfSplitTensor
from .safetensors import SafetensorsLoader

PARAMETERS, WEIGHTS = "params.json", "consolidated*.safetensors"
#: (pattern, replacement): the file's names → transformers'.
_RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^tok_embeddings\.", "model.embed_tokens."),
        (r"^norm\.", "model.norm."),
        (r"^output\.", "lm_head."),
        (r"^layers\.(\d+)\.attention_norm\.", r"model.layers.\1.input_layernorm."),
        (r"^layers\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
        (r"^layers\.(\d+)\.attention\.w([qkvo])\.", r"model.layers.\1.self_attn.\2_proj."),
        (r"^layers\.(\d+)\.feed_forward\.w1\.", r"model.layers.\1.mlp.gate_proj."),
        (r"^layers\.(\d+)\.feed_forward\.w2\.", r"model.layers.\1.mlp.down_proj."),
        (r"^layers\.(\d+)\.feed_forward\.w3\.", r"model.layers.\1.mlp.up_proj."),
        (r"^layers\.(\d+)\.(?:feed_forward|block_sparse_moe)\.gate\.", r"model.layers.\1.block_sparse_moe.gate."),
        (r"^layers\.(\d+)\.(?:feed_forward\.)?experts\.", r"model.layers.\1.block_sparse_moe.experts."),
    )
]


def consolidated(folder: Path) -> list[Path]:
    """The files of weights in `folder`."""
    return sorted(folder.glob(WEIGHTS))


class MistralLoader(SafetensorsLoader):
    """The tensors of `consolidated*.safetensors` by transformers' names."""

    def supports(self, folder: Path) -> str | None:
        if not (folder / PARAMETERS).is_file() or not consolidated(folder):
            return f"there is no {PARAMETERS} with {WEIGHTS}"
        others = [path.name for path in folder.glob("*.safetensors") if path not in consolidated(folder)]
        if others and not self.setup.named:
            return f"the folder has its weights as {others[0]} too"
        return None

    def tensors(self) -> Iterator[LazyTensor]:
        file = self.folder / PARAMETERS
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            heads = {"wq": int(values["n_heads"]), "wk": int(values.get("n_kv_heads") or values["n_heads"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} does not state the heads of the model: {error!r}") from None
        seen: dict[str, Path] = {}
        self._strategy.expect(consolidated(self.folder))
        for path in consolidated(self.folder):
            for tensor in self.read_file(path, strategy=self._strategy):
                if tensor.name in seen:
                    raise ValueError(f"{path} holds the tensor {tensor.name}, which is in {seen[tensor.name].name} too")
                seen[tensor.name] = path
                part = tensor.name.split(".")[-2] if "." in tensor.name else ""
                yield HalfSplitTensor(tensor, _renamed(tensor.name), heads.get(part, 0))


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name, found = pattern.subn(replacement, name)
        if found:
            break
    return name
