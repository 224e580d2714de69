"""Facts of a checkpoint folder: config.json with the user's overrides, lengths, dtype, end tokens, sampling defaults.

Reads the small JSON files only: no weights, and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.quoting import quoted

from .context_length import MAX_LENGTH, derive_max_model_len
from .errors import ConfigError
from .json_file import check_files, read_json, read_optional
from .mappings import merge
from .pooling import PoolingPlan, read_pooling
from .tree import FrameConfig

DEMO_FOLDER = Path(__file__).parents[2] / "plugins" / "models" / "demo"
#: The name of the demo model, for users and in answers.
DEMO_NAME = "demo"
#: Sizes in config.json → the largest accepted one: far above that of any model, and below what makes Python, numpy or
#: torch fail in the middle of a start.
_SIZES = {
    "hidden_size": 1 << 20, "num_hidden_layers": 1 << 12, "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14, "head_dim": 1 << 14, "intermediate_size": 1 << 22,
    "n_embd": 1 << 20, "n_layer": 1 << 12, "n_head": 1 << 14,
    "max_position_embeddings": MAX_LENGTH, "vocab_size": 1 << 24,
}  # fmt: skip
#: Sizes that may be 0, in models without that part → the largest accepted one.
_OPTIONAL_SIZES = {
    "moe_intermediate_size": 1 << 22, "shared_expert_intermediate_size": 1 << 22, "num_experts": 1 << 16,
    "num_local_experts": 1 << 16, "n_routed_experts": 1 << 16, "type_vocab_size": 1 << 24, "sliding_window": MAX_LENGTH,
}  # fmt: skip
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Checkpoint:
    """The facts of a checkpoint that are known before any weight is read.

    `hf` is config.json with `hf_overrides` merged in, `text` the part of it about the text model. `model_max_len` are
    the tokens that the model was made for, `max_model_len` the user's limit if there is one, else the same. `dtype` is
    the type of the stored weights by its torch name. `generation` holds default sampling values. `pooling` says how a
    pooling model makes vectors; None for one that generates. `model_plugin` is the plugin that the user chose for it,
    `model_impl` whether any model of an architecture may serve it. `quantization` says how the weights are quantised;
    None where they are not.
    """

    folder: Path
    hf: dict[str, Any]
    text: dict[str, Any]
    architecture: str
    vocab_size: int
    max_model_len: int
    model_max_len: int
    dtype: str
    eos_token_ids: list[int]
    generation: dict[str, Any]
    pooling: PoolingPlan | None = None
    model_plugin: str | None = None
    quantization: Mapping[str, Any] | None = None
    model_impl: str = "auto"

    @property
    def model_type(self) -> str:
        """The family's name in transformers."""
        return str(self.text.get("model_type", self.hf.get("model_type", "")))


def read_checkpoint(config: FrameConfig) -> Checkpoint:
    """Reads the folder that `find_folder` finds for `config.model`.

    Raises `ConfigError`, one sentence, for a folder or config.json that is missing or unreadable, a missing
    architecture, wrong sizes, or a `max_model_len` above what the model was made for.
    """
    folder = find_folder(config.model.model, config.model.revision)
    check_files(folder)
    hf = merge(read_json(folder / "config.json", "a checkpoint has one"), config.model.hf_overrides)
    architecture = _architecture(hf, folder)
    text = _text_part(hf, folder)
    _check_sizes(text, folder)
    model_max_len = derive_max_model_len(text)
    pooling = read_pooling(config, folder, hf, architecture)
    if pooling is not None and pooling.max_len is not None:
        model_max_len = min(model_max_len, pooling.max_len)
    stored = read_optional(folder / "generation_config.json")
    return Checkpoint(
        folder=folder,
        hf=hf,
        text=text,
        architecture=architecture,
        vocab_size=_positive(text, "vocab_size", folder),
        max_model_len=_max_model_len(config.model.max_model_len, model_max_len, folder),
        model_max_len=model_max_len,
        dtype=_dtype(hf, text),
        eos_token_ids=_eos_token_ids(stored, text, hf),
        generation=_generation(config, stored),
        pooling=pooling,
        model_plugin=config.model.model_plugin,
        quantization=_quantization(hf, text, folder),
        model_impl=config.model.model_impl,
    )


def is_name(model: str | None) -> bool:
    """Whether `model` is neither a path that exists nor the demo model, so that a model source must fetch it."""
    return bool(model) and model != DEMO_NAME and not Path(str(model)).expanduser().exists()


def may_be_described(model: str) -> bool:
    """Whether `model` is there and perhaps in a form that a model source describes: no folder with the usual files."""
    path = Path(model).expanduser()
    usual = (path / "snapshots").is_dir() or ((path / "config.json").is_file() and any(path.glob("*.safetensors")))
    return bool(model) and path.exists() and not usual


def find_folder(model: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `model`, or of `revision` the subfolder, commit or branch in it.

    "" is the demo model, "demo" too where there is no such folder. Raises `ConfigError` where nothing is there.
    """
    folder = Path(model).expanduser()
    if not model or (model == DEMO_NAME and not folder.exists()):
        return DEMO_FOLDER
    if not folder.exists():
        raise ConfigError(
            f"no folder {quoted(model)}; give the path of a checkpoint, or the name of a model (org/model)"
        )
    if not folder.is_dir():
        raise ConfigError(f"model {quoted(model)} is a file; name the folder of the checkpoint")
    snapshots = folder / "snapshots"
    if revision is not None:
        return _revision_folder(folder, revision)
    if snapshots.is_dir() and not (folder / "config.json").exists():
        return _revision_folder(folder, "main")
    return folder


def _revision_folder(folder: Path, revision: str) -> Path:
    """Returns the folder of `revision`: a branch under refs/, a commit under snapshots/, or a subfolder."""
    if Path(revision).is_absolute() or ".." in Path(revision).parts:
        raise ConfigError(f"revision {quoted(revision)} must be a name, not a path")
    reference = folder / "refs" / revision
    names = [reference.read_text().strip()] if reference.is_file() else []
    for candidate in (*(folder / "snapshots" / name for name in (*names, revision)), folder / revision):
        if candidate.is_dir():
            return candidate
    known = sorted(path.name for path in (folder / "snapshots").glob("*") if path.is_dir())
    raise ConfigError(f"no revision {quoted(revision)} in {folder}; there are: {', '.join(known) or 'none'}")


def _architecture(hf: Mapping[str, Any], folder: Path) -> str:
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            f"{folder / 'config.json'} names no architecture; "
            'give one with --hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\''
        )
    return names[0]


def _text_part(hf: dict[str, Any], folder: Path) -> dict[str, Any]:
    part = hf.get("text_config", hf)
    if not isinstance(part, dict):
        raise ConfigError(f"text_config in {folder / 'config.json'} must be an object, got {type(part).__name__}")
    if part is not hf and "tie_word_embeddings" in hf:  # the head is of the whole
        part = {**part, "tie_word_embeddings": hf["tie_word_embeddings"]}
    if "vocab_size" in part:
        return part
    # Some published folders leave out values that equal the family's defaults; transformers has these (slow to import).
    from transformers import AutoConfig

    try:
        defaults = AutoConfig.for_model(part.get("model_type", hf.get("model_type", ""))).to_dict()
    except ValueError:
        return part
    return merge(defaults, part)


def _check_sizes(text: Mapping[str, Any], folder: Path) -> None:
    """Refuses sizes that no model has, before a library uses them. Families state different ones."""
    for key in _SIZES:
        if isinstance(text.get(key), (str, int, float)):
            _positive(text, key, folder)
    for key, most in _OPTIONAL_SIZES.items():
        if isinstance(text.get(key), (int, float)) and not 0 <= text[key] <= most:
            raise ConfigError(f"{key} in {folder / 'config.json'} must be from 0 to {most}, got {quoted(text[key])}")


def _positive(text: Mapping[str, Any], key: str, folder: Path) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _SIZES[key]:
        raise ConfigError(
            f"{key} in {folder / 'config.json'} must be a positive integer up to {_SIZES[key]}, got {quoted(value)}"
        )
    return value


def _max_model_len(wanted: int | None, model_max_len: int, folder: Path) -> int:
    if wanted is None or wanted == -1:
        return model_max_len
    if wanted < 2:  # a token of the prompt and one of the answer
        raise ConfigError(f"max_model_len must be at least 2, or -1 for what fits in memory, got {wanted}")
    if wanted > model_max_len:
        raise ConfigError(
            f"max_model_len {wanted} is above the {model_max_len} tokens that the model in {folder} was made for; "
            'lower it, or extend the model with --hf-overrides (rope_parameters, or "max_position_embeddings")'
        )
    return wanted


def _dtype(hf: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    stored = next((part[key] for part in (text, hf) for key in ("dtype", "torch_dtype") if part.get(key)), "float32")
    name = str(stored).removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def _quantization(hf: Mapping[str, Any], text: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """The quantization_config of config.json or of its text part, or what hf_quant_config.json says."""
    for part in (hf, text):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                found = part[key]
                if not isinstance(found, dict):
                    raise ConfigError(f"{key} in {folder / 'config.json'} must be an object, got {quoted(found)}")
                return found
    return read_optional(folder / "hf_quant_config.json") or None


def _eos_token_ids(*sources: Mapping[str, Any]) -> list[int]:
    """Returns the end tokens of all sources in order, each once."""
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool):
                found.setdefault(token)
    return list(found)


def _generation(config: FrameConfig, stored: dict[str, Any]) -> dict[str, Any]:
    """Returns default sampling values: the checkpoint's, those of another folder or none, with the user's overrides."""
    source = config.model.generation_config
    if source == "frame":
        values: dict[str, Any] = {}
    elif source == "auto":
        values = stored
    else:
        path = Path(source).expanduser()
        file = path if path.is_file() else path / "generation_config.json"
        values = read_json(file, "--generation-config names a folder that has one, auto or frame")
    return merge(values, config.model.override_generation_config)
