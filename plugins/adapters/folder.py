"""Finds adapters by name in one folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from frame.interfaces import AdapterResolver

from .folder_options import FolderOptions
from .peft_config import CONFIG


class FolderResolver(AdapterResolver):
    """The adapter NAME is the folder NAME below the root, if it holds an adapter_config.json.

    Names that lead out of the root, by "..", a link or a leading "/", are unknown, and so are other spellings of a
    name, such as "./NAME": each name that is found counts as an adapter of its own.
    """

    options: FolderOptions

    def resolve(self, name: str) -> Path | None:
        parts = PurePosixPath(name)
        if parts.as_posix() != name or ".." in parts.parts:
            return None
        try:
            root = self.options.root.resolve()
            folder = (root / name).resolve()
            inside = folder != root and folder.is_relative_to(root)
            return folder if inside and (folder / CONFIG).is_file() else None
        except (OSError, ValueError, RuntimeError):  # a name that no file can have
            return None
