"""Which GGUF files a user means: a file, a folder with one model, or one of several by the name of its types."""

from __future__ import annotations

import re
from pathlib import Path

from .file import parts_of

_PART = re.compile(r"-\d{5}-of-\d{5}$")
#: Files beside a model that hold no language model.
_OTHERS = re.compile(r"(^|[-_.])(mmproj|imatrix)([-_.]|$)", re.IGNORECASE)


def files_in(folder: Path, quant: str = "") -> list[Path]:
    """The files, in order, of the one model in `folder` whose name says `quant`; [] where there is none at all.

    Raises `ValueError` where several models are there, or none of that name.
    """
    models: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        if not _OTHERS.search(path.stem):
            models.setdefault(_PART.sub("", path.stem), path)
    if not models:
        return []
    found = [path for stem, path in models.items() if not quant or is_of(stem, quant)]
    if len(found) == 1:
        return parts_of(found[0])
    names = ", ".join(models)
    if not found:
        raise ValueError(f"{folder} has no GGUF file of {quant}; there are: {names}")
    raise ValueError(f"{folder} has {len(found)} models in GGUF files: {names}; name one, as {folder}:Q4_K_M")


def is_of(stem: str, quant: str) -> bool:
    """Whether the name of a file says that its weights are of the type `quant`."""
    return re.search(rf"(^|[-_.]){re.escape(quant)}([-_.]|$)", stem, re.IGNORECASE) is not None


def split_name(model: str) -> tuple[str, str]:
    """(path, type) of "PATH:TYPE"; the type is "" where none is named."""
    path, colon, quant = model.rpartition(":")
    return (path, quant) if colon and re.fullmatch(r"\w+", quant) and path else (model, "")
