"""The model source `hub`: fetches models from Hugging Face, or another hub of its protocol, into Hugging Face's cache.

It fetches only safetensors, JSON, tokenizer and template files, never pickles or code, and compares each new file with
its hash. The variables of Hugging Face's library (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) say which hub, cache
and token it uses, and whether there is a network. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from frame.interfaces import ModelSource
from frame.quoting import quoted
from frame.settings import ConfigError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_TEXTS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
#: Copies of the weights in other forms, in subfolders or in files for other programs.
_DOUBLES = ["*/*.safetensors", "*/*.index.json", "consolidated*", "original/*", "onnx/*", "metal/*"]
_REPORT_SECONDS = 15.0
#: Seconds without a byte after which a transfer counts as abandoned by a killed process.
_STALE_SECONDS = 3600.0
#: Errors of the system that mean the cache and not the network.
_CACHE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST)


class HubSource(ModelSource):
    """Files of a model at a hub, in the cache that Hugging Face's tools share."""

    @classmethod
    def supports(cls, name: str) -> str | None:
        if os.path.exists(name):
            return "it is a file or folder here"
        named = _NAME.fullmatch(name) and not name.endswith(".gguf")  # the name of a file that is not here
        return None if named else "models at a hub are named NAME or ORGANISATION/NAME"

    def fetch(self, name: str, revision: str | None, *, weights: bool) -> Path:
        patterns = [*_TEXTS, *["*.safetensors"] * weights]
        folder = fetch_files(name, revision, self.setup.download_dir, patterns, offline=self.setup.offline)
        if weights and not any(folder.glob("*.safetensors")):
            raise ConfigError(
                f"model {quoted(name)} has no .safetensors file; pickles (.bin, .pt) are not fetched: convert it to "
                f"safetensors, or name the type of a GGUF file that it has, as {name}:Q4_K_M"
            )
        return folder


def fetch_files(
    name: str, revision: str | None, download_dir: str | None, patterns: Sequence[str], *, offline: bool
) -> Path:
    """The cache's folder of the revision's commit, once its files of these patterns are there.

    Raises `ConfigError`, one sentence, for a model that is not there or cannot be fetched.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Bars(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": not sys.stderr.isatty()})

    cache = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    with _unchecked(repository) as known:
        with _one_sentence(name, revision or "main", cache, offline=offline), _reports(name, repository / "blobs"):
            folder = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    cache_dir=cache,
                    local_files_only=offline,
                    allow_patterns=list(patterns),
                    ignore_patterns=_DOUBLES,
                    tqdm_class=Bars,
                )
            )
        _check_hashes(name, [path for path in folder.rglob("*") if path.is_file() and path.resolve().name not in known])
    return folder


@contextmanager
def _unchecked(repository: Path) -> Iterator[set[str]]:
    """The names of the blobs that are in the cache already.

    A file keeps these names until the block has ended well, so that files of a killed process are checked too.
    """
    note, blobs = repository / "frame-unchecked", repository / "blobs"
    known = set(note.read_text().split()) if note.exists() else {path.name for path in blobs.glob("*")}
    with suppress(OSError):  # a cache that cannot be written may still be read
        for left in blobs.glob("*.incomplete"):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()
        repository.mkdir(parents=True, exist_ok=True)
        note.write_text("\n".join(known))
    try:
        yield known
    except BaseException:
        if not any(blobs.glob("*")):
            with suppress(OSError):
                note.unlink()
                repository.rmdir()
        raise
    with suppress(OSError):
        note.unlink()


def _check_hashes(name: str, paths: list[Path]) -> None:
    """Removes files that are not what the hub says they are, and raises `ConfigError` for the first of them."""
    with ThreadPoolExecutor(4) as pool:
        for path, is_sound in zip(paths, pool.map(_is_sound, paths), strict=True):
            if not is_sound:
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise ConfigError(
                    f"{path.name} of model {quoted(name)} does not have the hash that the hub states; it was removed: "
                    "start again to fetch it anew"
                )


def _is_sound(path: Path) -> bool:
    """Whether a file has its hash: the cache names large ones by SHA-256, small ones by git's SHA-1, others are new."""
    stated = path.resolve().name
    digest = {64: hashlib.sha256, 40: lambda: hashlib.sha1(usedforsecurity=False)}.get(len(stated))
    if digest is None or not re.fullmatch("[0-9a-f]+", stated):
        return True
    found = digest()
    if len(stated) == 40:
        found.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest() == stated


@contextmanager
def _reports(name: str, blobs: Path) -> Iterator[None]:
    """Logs the progress of a transfer where the library's bars are not shown, and the bytes that it downloaded."""
    ended, before, began = threading.Event(), _num_bytes(blobs), time.monotonic()

    def report() -> None:
        while not ended.wait(_REPORT_SECONDS):
            logger.info("fetching %s: %.2f GB so far", name, (_num_bytes(blobs) - before) / 1e9)

    if not sys.stderr.isatty():
        threading.Thread(target=report, daemon=True, name="frame-fetching").start()
    try:
        yield
    finally:
        ended.set()
    if brought := _num_bytes(blobs) - before:
        logger.info("fetched %s: %.2f GB in %.0f s", name, brought / 1e9, time.monotonic() - began)


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):  # a transfer renames its file when it ends
            total += path.stat().st_size
    return total


class _Unknown(Exception):
    """A placeholder for an error class that an older library lacks."""


@contextmanager
def _one_sentence(name: str, revision: str, cache: Path, *, offline: bool) -> Iterator[None]:
    """Turns an exception of the library into a `ConfigError` that says what to do."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    forbidden = offline or constants.HF_HUB_OFFLINE
    closed = f"{hub} is not asked (--offline, HF_HUB_OFFLINE)" if forbidden else f"{hub} cannot be reached"
    cached = (cache / f"models--{name.replace('/', '--')}" / "snapshots").exists()
    reasons: list[tuple[type[BaseException], str]] = [
        (errors.GatedRepoError, f"is gated: accept its terms at {hub}/{name}, set HF_TOKEN to that account's token"),
        (errors.RepositoryNotFoundError, f"is not a local folder, and {hub} has none of that name that can be read "
         "with this token or without one (HF_TOKEN)"),
        (errors.RevisionNotFoundError, f"has no revision {quoted(revision)} at {hub}"),
        (getattr(errors, "IncompleteSnapshotError", _Unknown), f"is not complete in {cache}, and {closed}"),
        (errors.LocalEntryNotFoundError, "is not a local folder, "
         f"{f'revision {quoted(revision)} of it ' if cached else ''}is not in {cache}, and {closed}"),
    ]  # fmt: skip
    try:
        yield
    except Exception as error:  # also exceptions of the library's transport
        for kind, reason in reasons:
            if isinstance(error, kind):
                raise ConfigError(f"model {quoted(name)} {reason}") from None
        if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
            raise ConfigError(
                f"model {quoted(name)} cannot be stored in {cache}: {error.strerror}; "
                "name another folder with --download-dir"
            ) from None
        status: Any = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            raise ConfigError(
                f"model {quoted(name)} cannot be fetched: {hub} wants a valid token in HF_TOKEN"
            ) from None
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"model {quoted(name)} cannot be fetched from {hub}: {text}; start again: files that are complete stay"
        ) from None
