"""How the engines that write to a folder divide their rows over workers, so that others can read what they wrote.

Each engine has a record, by its name and the kind of its rows. Engines that divide a model alike share one and its
files. Knows no block.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence

import msgspec

from frame.interfaces import decode, encode

from ..blocks.files import BlockFiles
from .row_forms import MOST_RANKS, RowForm, pieces_of

VERSION = 1
#: Most bytes of a record, and records that are looked at.
MOST_BYTES, MOST_RECORDS = 16 << 20, 64
#: How old a change of the folder must be for a later one to have another time, in nanoseconds.
_COARSE_NANOSECONDS = 100_000_000
_NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{16}")
_FORMATS = re.compile(r"[0-9a-f]{16}")


class WorkerForm(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a worker, and what `StepWorker.formats` is there."""

    formats: str
    rows: RowForm


class EngineForms(msgspec.Struct, frozen=True, array_like=True):
    """The rows of all workers of an engine, by their places."""

    version: int
    workers: list[WorkerForm]

    @classmethod
    def read(cls, data: bytes) -> EngineForms:
        """What an engine wrote of itself; raises `ValueError` where it can be of none."""
        if len(data) > MOST_BYTES:
            raise ValueError("a record has more bytes than it may")
        try:
            found = decode(data, cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError("what should be a record is none") from error
        if found.version != VERSION or not 0 < len(found.workers) <= MOST_RANKS:
            raise ValueError("a record is of another version, or of no engine")
        for worker in found.workers:
            if not _FORMATS.fullmatch(worker.formats):
                raise ValueError("a worker has formats that cannot be")
            worker.rows.check()
        return found

    @property
    def forms(self) -> list[RowForm]:
        """The rows of each worker."""
        return [worker.rows for worker in self.workers]

    def spaces(self, name: str) -> list[str]:
        """Where the workers of the engine called so keep their files; "" where one has no rows."""
        return [
            f"{blocks_of(name)}/{place}-{worker.formats}" if worker.rows.row_bytes else ""
            for place, worker in enumerate(self.workers)
        ]

    def name(self, blocks_name: str) -> str:
        """The name of the engine, whose files begin with that."""
        digest = hashlib.blake2b(encode([worker.formats for worker in self.workers]), digest_size=8)
        return f"{blocks_name}-{digest.hexdigest()}"


def blocks_of(name: str) -> str:
    """With what the files of the engine called so begin."""
    return name.partition("-")[0]


class DiskForms:
    """The records in `files` of engines with blocks of that `space` (see `space_name`), of rows of a `kind`."""

    def __init__(self, files: BlockFiles, space: str, kind: str) -> None:
        self._files = files
        self._space = f"forms/{kind}{space}"
        self._changed = 0
        self._known: dict[str, EngineForms] = {}
        self._readable: tuple[dict[str, EngineForms], list[tuple[str, list[str]]]] | None = None

    def publish(self, blocks_name: str, forms: EngineForms) -> str:
        """Writes the record of an engine; returns its name."""
        name = forms.name(blocks_name)
        self._files.write_record(self._space, name, encode(forms))
        return name

    def touch(self, blocks_name: str, forms: EngineForms) -> None:
        """The files of the engine are used, and so its record goes after them; if it went, it is written again."""
        if not self._files.touch_record(self._space, forms.name(blocks_name)):
            self.publish(blocks_name, forms)

    def names(self) -> list[str]:
        """Those of all engines, sound or not."""
        return [name for name in self._files.record_names(self._space)[0] if _NAME.fullmatch(name)]

    def all(self) -> dict[str, EngineForms]:
        """What is sound."""
        names, changed = self._files.record_names(self._space)
        if changed != self._changed:
            called = [name for name in names if _NAME.fullmatch(name)][:MOST_RECORDS]
            found = ((name, self._read(name)) for name in called)
            self._known = {name: forms for name, forms in found if forms is not None}
            # its time is that of a coarse clock: it may change again without another time
            self._changed = changed if time.time_ns() - changed > _COARSE_NANOSECONDS else 0
        return self._known

    def of(self, name: str) -> EngineForms | None:
        """That of an engine, where it is sound."""
        return self.all().get(name)

    def readable(self, own: Sequence[RowForm], but: str) -> list[tuple[str, list[str]]]:
        """(name, spaces) of engines from whose files all workers with the rows `own` can take theirs, `but` one."""
        known = self.all()
        if self._readable is None or self._readable[0] is not known:
            fit = {
                name: forms
                for name, forms in known.items()
                if name != but and all(pieces_of(form, forms.forms) is not None for form in own)
            }
            spaces = [(name, [space for space in forms.spaces(name) if space]) for name, forms in fit.items()]
            self._readable = known, spaces
        return self._readable[1]

    def _read(self, name: str) -> EngineForms | None:
        data = self._files.record(self._space, name, MOST_BYTES)
        try:
            return None if data is None else EngineForms.read(data)
        except ValueError:
            return None
