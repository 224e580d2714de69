"""The model source `gguf`: describes the model in a GGUF file by a folder that has what a checkpoint has.

The folder holds config.json, generation_config.json and a tokenizer, made from the file's metadata, and links to the
files. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from frame.interfaces import ModelSource
from frame.settings import ConfigError

from ..sources.described import Description, described
from .choice import files_in, is_of, split_name
from .file import TensorInfo, parts_of, read_files
from .settings import end_tokens, read_settings
from .tokenizer import write_tokenizer
from .types import BY_NAME

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
#: Type of most values of a file → the type to compute in.
_DTYPES = {"F32": "float32", "F16": "float16"}


class GgufSource(ModelSource):
    """Models in GGUF files: a file, a folder, FOLDER:QUANT, or ORGANISATION/NAME:QUANT at a hub."""

    @classmethod
    def supports(cls, name: str) -> str | None:
        path, quant = (name, "") if os.path.exists(name) else split_name(name)
        local = Path(path).expanduser()
        if os.path.isfile(local) and local.suffix == ".gguf":
            return None
        if os.path.isdir(local):
            return None if any(local.glob("*.gguf")) else f"folder {path!r} has no .gguf file"
        if quant and _HUB_NAME.fullmatch(path):
            return None
        return "models in GGUF files are named FILE.gguf, FOLDER, FOLDER:QUANT or ORGANISATION/NAME:QUANT"

    def fetch(self, name: str, revision: str | None, *, weights: bool) -> Path:
        path, quant = (name, "") if os.path.exists(name) else split_name(name)
        local = Path(path).expanduser()
        try:
            if local.is_file():
                files = parts_of(local)
            elif local.is_dir():
                files = files_in(local, quant)
            else:
                files = self._fetched(path, quant, revision)
            return described(files, self.setup.download_dir, _describe)
        except ValueError as error:
            raise ConfigError(f"model {name!r}: {error}") from None

    def _fetched(self, name: str, quant: str, revision: str | None) -> list[Path]:
        """The files of a model at a hub, fetched where they are not there yet."""
        from ..sources.hub import fetch_files

        forms = dict.fromkeys((quant, quant.upper(), quant.lower()))
        folder = fetch_files(
            name, revision, self.setup.download_dir, [f"*{form}*.gguf" for form in forms], offline=self.setup.offline
        )
        found = sorted({path.parent for path in folder.rglob("*.gguf") if is_of(path.stem, quant)})
        if not found:
            raise ValueError(f"it has no GGUF file of {quant}")
        return files_in(found[0], quant)


def _describe(files: Sequence[Path], folder: Path) -> Description:
    """Writes the tokenizer into `folder`, and says what the configuration is."""
    values, tensors = read_files(list(files))
    by_name = {info.name: (path, info) for path, info in tensors}
    try:
        settings = read_settings(
            values, {name: info.shape for name, (_, info) in by_name.items()}, lambda name: _floats(by_name, name)
        )
    except ValueError as error:
        raise ValueError(f"{files[0]}: {error}") from None
    try:
        write_tokenizer(values, folder)
        logger.info("%s: the tokenizer and its chat template are those of the file; --tokenizer names others",
                    files[0].name)  # fmt: skip
    except Exception as error:  # tokenizers raises nothing more special for lists that do not fit
        logger.warning("%s: %s; name a tokenizer with --tokenizer", files[0], error)
    sizes = Counter[str]()
    for info in (info for _, info in tensors):
        sizes[info.kind.name] += info.num_bytes
    packed = [name for name, _ in sizes.most_common() if BY_NAME[name].values > 1]
    most = sizes.most_common(1)[0][0]
    settings["dtype"] = _DTYPES.get(most, "bfloat16")
    if packed:
        settings["quantization_config"] = {"quant_method": "gguf", "default": packed[0]}
    return Description(settings, end_tokens(values))


def _floats(tensors: Mapping[str, tuple[Path, TensorInfo]], name: str) -> list[float] | None:
    if name not in tensors:
        return None
    path, info = tensors[name]
    if info.kind.name != "F32":
        raise ValueError(f"tensor {name} has type {info.kind.name}, expected F32")
    found: Any = np.fromfile(path, "<f4", info.num_bytes // 4, offset=info.start)
    return [float(value) for value in found]
