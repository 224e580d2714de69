"""Folders that describe models whose own files are in another form: a configuration, a tokenizer, links to the files.

They are kept beside what is fetched, one for each state of the files, so that a start finds what the last one wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from frame.settings import ConfigError

#: Changes whenever other descriptions are made of the same files.
_FORM = "1"


class Description(NamedTuple):
    """config.json, and the tokens that end an output."""

    settings: Mapping[str, Any]
    end_tokens: Sequence[int] = ()


def described(
    files: Sequence[Path], download_dir: str | None, describe: Callable[[Sequence[Path], Path], Description]
) -> Path:
    """The folder that describes a model in these files.

    `describe(files, folder)` says what its configuration is, and may write further files into the folder. Raises what
    it raises, and `ConfigError` where no folder can be written.
    """
    cache = Path(download_dir).expanduser() if download_dir else _cache()
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((_FORM, states)).encode()).hexdigest()[:16]
    target = cache / f"{files[0].stem[:80]}-{digest}"
    if (target / "config.json").is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".describing-", dir=cache))
    except OSError as error:
        raise ConfigError(
            f"a description of {files[0]} cannot be written to {cache}: {error.strerror}; "
            "name another folder with --download-dir"
        ) from None
    try:
        _write(folder, files, describe(files, folder))
        os.replace(folder, target)
    except OSError as error:
        if not (target / "config.json").is_file():  # another process was faster
            raise ConfigError(f"{files[0]} cannot be described in {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _write(folder: Path, files: Sequence[Path], description: Description) -> None:
    for path in files:
        (folder / path.name).symlink_to(path.resolve())
    if description.end_tokens:
        ends = json.dumps({"eos_token_id": list(description.end_tokens)})
        (folder / "generation_config.json").write_text(ends, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(description.settings, indent=1), encoding="utf-8")
    folder.chmod(0o755)


def _cache() -> Path:
    return Path("~/.cache/frame/models").expanduser()
