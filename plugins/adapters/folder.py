"""Finds adapters by name in one folder."""

from __future__ import annotations

from pathlib import Path

from frame.interfaces import AdapterResolver

from .folder_options import FolderOptions
from .peft_config import CONFIG


class FolderResolver(AdapterResolver):
    """The adapter NAME is the folder NAME below the root, if it holds an adapter_config.json.

    Names that lead out of the root, by "..", a link or a leading "/", are unknown.
    """

    options: FolderOptions

    def resolve(self, name: str) -> Path | None:
        try:
            root = self.options.root.resolve()
            folder = (root / name).resolve()
            inside = folder != root and folder.is_relative_to(root)
            return folder if inside and (folder / CONFIG).is_file() else None
        except (OSError, ValueError):  # a name that no file can have
            return None
