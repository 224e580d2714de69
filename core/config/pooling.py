"""How a checkpoint makes vectors: from its architecture, the files of sentence-transformers, and the user's settings.

Reads the small JSON files only. A fact that the folder does not state is None, and the model's class decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from frame.quoting import quoted

from .dense_modules import DenseModule, read_dense
from .errors import ConfigError
from .json_file import read_list, read_optional
from .tree import FrameConfig

Purpose = Literal["embed", "classify", "reward"]
Activation = Literal["identity", "sigmoid", "softmax"]

#: How the architectures end that classify each token.
_OF_TOKENS = "ForTokenClassification"
#: (suffix of an architecture, what such a model is for); the first match counts.
_ENDINGS: tuple[tuple[str, Purpose | None], ...] = (
    ("ForCausalLM", None),
    ("LMHeadModel", None),
    ("ForConditionalGeneration", None),
    ("ForSequenceClassification", "classify"),
    (_OF_TOKENS, "classify"),
    ("RewardModel", "reward"),
    ("Model", "embed"),
)
#: What sentence-transformers calls a way of pooling, in old and new files → pooler
_MODES = {"cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
#: Most classes of a model that states no names for them.
_MAX_LABELS = 1 << 20


@dataclass(frozen=True)
class PoolingPlan:
    """The facts of a pooling model that are known before its class is chosen.

    `pooler` None: the one of its class. If `is_matryoshka`, embeddings may be cut to the sizes in `matryoshka`, to any
    size when that is (). `activation` makes probabilities of `num_labels` scores. `max_len` is the longest text, in
    tokens, that the model was trained on; None where the model's positions are the limit. `dense` follows pooling.
    """

    purpose: Purpose
    pooler: str | None
    normalize: bool
    activation: Activation
    use_activation: bool
    num_labels: int
    labels: tuple[str, ...] = ()
    max_len: int | None = None
    is_matryoshka: bool = False
    matryoshka: tuple[int, ...] = ()
    dense: tuple[DenseModule, ...] = ()


def read_pooling(config: FrameConfig, folder: Path, hf: Mapping[str, Any], architecture: str) -> PoolingPlan | None:
    """Returns the plan of the pooling model in `folder`; None for a model that generates.

    Raises `ConfigError` for settings that contradict each other, and for files that are wrong.
    """
    modules = read_list(folder / "modules.json")
    purpose = _purpose(config, architecture, bool(modules))
    if purpose is None:
        return None
    stored = _sentence_modules(folder, modules) if purpose == "embed" else {}
    sizes = tuple(int(size) for size in hf.get("matryoshka_dimensions") or ())
    labels, wanted = _labels(hf), config.pooler
    normalize = stored.get("normalize", True) if wanted.normalize is None else wanted.normalize
    pooler = stored.get("pooler") if wanted.pooling_type == "auto" else wanted.pooling_type
    if pooler is None and (purpose == "reward" or architecture.endswith(_OF_TOKENS)):
        pooler = "all"
    return PoolingPlan(
        purpose=purpose,
        pooler=pooler,
        normalize=bool(normalize),
        activation=_activation(hf, len(labels)),
        use_activation=purpose == "classify" if wanted.use_activation is None else wanted.use_activation,
        num_labels=len(labels),
        labels=labels,
        max_len=_sentence_length(folder),
        is_matryoshka=bool(hf.get("is_matryoshka") or sizes),
        matryoshka=sizes,
        dense=stored.get("dense", ()),
    )


def _purpose(config: FrameConfig, architecture: str, has_modules: bool) -> Purpose | None:
    runner, convert = config.model.runner, config.model.convert
    ending = next((purpose for suffix, purpose in _ENDINGS if architecture.endswith(suffix)), None)
    if runner == "generate" or (runner == "auto" and convert == "none" and ending is None):
        if ending is not None and convert != "auto":
            raise ConfigError(f"convert {quoted(convert)} needs runner 'pooling', got runner {quoted(runner)}")
        return None
    if convert != "auto" and convert != "none":
        return convert
    if ending is not None:
        return ending
    if convert == "none" and runner == "pooling":
        return "reward"  # scores of the vocabulary, as they are
    return "embed" if has_modules or runner == "pooling" else None


def _labels(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the classes, in order. config.json has names, or only their number, by default two."""
    names = hf.get("id2label")
    if isinstance(names, Mapping) and names:
        if not all(str(index).isascii() and str(index).isdigit() for index in names):
            raise ConfigError(f"id2label in config.json must map numbers to names, got {quoted(next(iter(names)))}")
        ordered = sorted(names.items(), key=lambda item: int(item[0]))
        return tuple(str(name) for _, name in ordered)
    number = hf.get("num_labels") or 2
    if not isinstance(number, int) or not 1 <= number <= _MAX_LABELS:
        raise ConfigError(f"num_labels in config.json must be an integer up to {_MAX_LABELS}, got {quoted(number)}")
    return tuple(f"LABEL_{index}" for index in range(number))


def _activation(hf: Mapping[str, Any], num_labels: int) -> Activation:
    """Returns what a cross-encoder of sentence-transformers states, else what suits its `problem_type`."""
    stated = (hf.get("sentence_transformers") or {}).get("activation_fn") or hf.get(
        "sbert_ce_default_activation_function"
    )
    if isinstance(stated, str):
        name, known = stated.rpartition(".")[2].lower(), get_args(Activation)
        if name not in known:
            raise ConfigError(f"no activation {quoted(stated)}; there are: {', '.join(known)}")
        return cast("Activation", name)
    problems: Mapping[str, Activation] = {
        "regression": "identity",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    return problems.get(str(hf.get("problem_type")), "sigmoid" if num_labels < 2 else "softmax")


def _sentence_modules(folder: Path, modules: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the modules of sentence-transformers say of pooling and what follows it; {} without modules."""
    if not modules:
        return {}
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in _MODULES]
    if unknown:
        raise ConfigError(
            f"{folder / 'modules.json'} names a module {quoted(unknown[0])}; there are: {', '.join(_MODULES)}"
        )
    found: dict[str, Any] = {"normalize": "Normalize" in kinds, "dense": read_dense(folder, modules, kinds)}
    if "Pooling" in kinds:
        path = folder / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json"
        found["pooler"] = _sentence_pooler(path, read_optional(path))
    return found


def _sentence_pooler(path: Path, settings: Mapping[str, Any]) -> str:
    stated, prefix = settings.get("pooling_mode"), "pooling_mode_"
    modes = stated if isinstance(stated, list) else [stated] if stated else []
    if not modes:
        modes = [key.removeprefix(prefix) for key, on in settings.items() if key.startswith(prefix) and on]
    if len(modes) != 1 or str(modes[0]) not in _MODES:
        raise ConfigError(
            f"{path} pools by {', '.join(map(str, modes)) or 'nothing'}; choose cls, mean or last with --pooling-type"
        )
    return _MODES[modes[0]]


def _sentence_length(folder: Path) -> int | None:
    """Returns max_seq_length of sentence-transformers, whose file is named after the model's family."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        length = read_optional(path).get("max_seq_length")
        if isinstance(length, int) and length > 0:
            return length
    return None
