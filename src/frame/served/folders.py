"""Whether what lies in a folder stays below another one. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

#: Most files and folders that are looked at.
MOST_ENTRIES = 10_000


def stray_link(folder: Path, root: Path) -> Path | None:
    """The first link in `folder`, or in folders below it, that leads out of `root`; None where all stay inside.

    Raises `OSError` for what cannot be read, `ValueError` for a folder with too much in it.
    """
    inside, left, seen, count = root.resolve(), [folder.resolve()], set[Path](), 0
    while left:
        here = left.pop()
        if here in seen:
            continue
        seen.add(here)
        with os.scandir(here) as entries:
            for entry in entries:
                count += 1
                if count > MOST_ENTRIES:
                    raise ValueError(f"{folder} holds more than {MOST_ENTRIES} files")
                target = Path(entry.path).resolve()
                if entry.is_symlink() and not target.is_relative_to(inside):
                    return Path(entry.path)
                if entry.is_dir():
                    left.append(target)
    return None
