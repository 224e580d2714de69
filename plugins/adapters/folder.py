"""Finds adapters by name in one folder."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

from frame.interfaces import AdapterResolver
from frame.settings import stray_link

from .folder_options import FolderOptions
from .peft_config import CONFIG

logger = logging.getLogger("frame.adapters")


class FolderResolver(AdapterResolver):
    """The adapter NAME is the folder NAME below the root, if it holds an adapter_config.json.

    Names that lead out of the root, by "..", a link or a leading "/", are unknown, and so are other spellings of a
    name, such as "./NAME": each name that is found counts as an adapter of its own. A folder with a link out of the
    root in it is unknown, too; a line in the log names the link.
    """

    options: FolderOptions

    def resolve(self, name: str) -> Path | None:
        parts = PurePosixPath(name)
        if parts.as_posix() != name or parts.is_absolute() or ".." in parts.parts:
            return None
        try:
            root = self.options.root.resolve()
            folder = (root / name).resolve()
            inside = folder != root and folder.is_relative_to(root)
            if folder.exists() and not folder.is_relative_to(root):
                logger.warning("the adapter %s is not served: it is a link that leads out of %s", root / name, root)
            if not inside or not (folder / CONFIG).is_file():
                return None
            if (stray := stray_link(folder, root)) is not None:
                logger.warning("the adapter %s is not served: %s is a link that leads out of %s", folder, stray, root)
                return None
            return folder
        except (OSError, ValueError, RuntimeError):  # a name that no file can have
            return None
