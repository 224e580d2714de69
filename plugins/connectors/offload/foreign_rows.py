"""Copies blocks out of the shelves of other engines, however they divide the model over ranks, and checks each.

Other processes may write to what is read, shorten it or remove it at any time.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import encode

from .row_forms import MOST_FORM_BYTES, MOST_RANKS, Piece, RowForm, copy_pieces, pieces_of
from .row_sums import RowSums, seal
from .rows_file import HEAD, MARK, MARKS_AT, form_file, rows_file, rows_start
from .shelf import Shelf, open_file
from .shelf_index import index_file, read_slot

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignRows:
    """For the worker with rows of this `form`, from the shelves in the folder `space`; `kind` is as in `rows_file`."""

    def __init__(self, space: int, form: RowForm, kind: str = "") -> None:
        self._space = space
        self._form = form
        self._kind = kind
        self._plans: dict[str, tuple[list[RowForm], list[bytes], list[Piece] | None]] = {}  # by shelf
        self._sums: dict[int, RowSums] = {}  # by the size of a row

    def take(self, name: str, slot: int, generation: int, key: bytes, out: Tensor) -> bool:
        """Copies the block in `slot` of a shelf to `out` uint8 [parts, row_bytes]; False where it is not sound."""
        with ExitStack() as undo:
            try:
                folder = os.open(name, _FOLDER, dir_fd=self._space)
            except OSError:
                return False
            undo.callback(os.close, folder)
            forms, digests, pieces = self._plan(name, folder)
            index = open_file(folder, index_file(self._kind))
            if index is None or pieces is None:
                return False
            undo.callback(os.close, index)
            rows: dict[int, int] = {}
            for place in {piece.place for piece in pieces}:
                descriptor = open_file(folder, rows_file(place, self._kind))
                if descriptor is None:
                    return False
                undo.callback(os.close, descriptor)
                if not _holds(descriptor, forms[place].row_bytes):
                    return False
                rows[place] = descriptor
            for part, row in enumerate(out):
                others: dict[int, tuple[RowForm, Tensor]] = {}
                for place, descriptor in rows.items():
                    # where it is all of one row, the copy goes where it belongs at once
                    whole = forms[place] == self._form and len(rows) == 1
                    theirs = row if whole else torch.empty(forms[place].row_bytes, dtype=torch.uint8)
                    named = key + digests[place]
                    if not self._read(descriptor, slot * len(out) + part, generation, named, part, theirs):
                        return False
                    if not whole:
                        others[place] = forms[place], theirs
                if others:
                    copy_pieces(pieces, self._form, row, others)
            found = read_slot(index, slot)
            return found is not None and (found[0], found[2]) == (generation, key)

    def _read(self, file: int, there: int, generation: int, key: bytes, part: int, out: Tensor) -> bool:
        head = os.pread(file, HEAD.size, 0)
        if len(head) != HEAD.size:
            return False
        start = rows_start(HEAD.unpack(head)[3])
        data: np.ndarray = out.numpy()
        if os.preadv(file, [data.data], start + there * len(out)) != len(out):
            return False
        mark = os.pread(file, MARK.size, MARKS_AT + MARK.size * there)
        sums = self._sums.get(len(out))
        if sums is None:
            sums = self._sums[len(out)] = RowSums(len(out), torch.device("cpu"))
        return mark == MARK.pack(generation, seal(int(sums(out.view(1, -1))), key, generation, part))

    def _plan(self, name: str, folder: int) -> tuple[list[RowForm], list[bytes], list[Piece] | None]:
        if name not in self._plans:
            forms = _forms(folder, self._kind)
            alike = next((place for place, form in enumerate(forms) if form == self._form), None)
            if alike is not None:
                pieces: list[Piece] | None = [Piece(index, alike, index) for index in range(len(self._form.layers))]
            else:
                pieces = pieces_of(self._form, forms)
            if pieces is None:  # its engine may be writing the forms
                return forms, [], None
            if len(self._plans) >= MOST_RANKS:
                self._plans.clear()
            self._plans[name] = forms, [form.digest for form in forms], pieces
        return self._plans[name]


def write_form(shelf: Shelf, place: int, form: RowForm, kind: str = "") -> None:
    """Says how the rows of a worker lie, for the workers of other engines; of one that has none, too."""
    data = encode(form)
    described = shelf.create(form_file(place, kind), len(data))
    os.pwrite(described, data, 0)
    os.close(described)


def _holds(file: int, row_bytes: int) -> bool:
    """Whether there are such rows in a file, before memory for one is taken."""
    head = os.pread(file, HEAD.size, 0)
    return len(head) == HEAD.size and HEAD.unpack(head)[2] == row_bytes <= os.fstat(file).st_size


def _forms(folder: int, kind: str) -> list[RowForm]:
    """The forms of all workers of a shelf, up to the first that cannot be read."""
    forms: list[RowForm] = []
    for place in range(MOST_RANKS):
        descriptor = open_file(folder, form_file(place, kind))
        if descriptor is None:
            break
        try:
            forms.append(RowForm.read(os.pread(descriptor, MOST_FORM_BYTES + 1, 0)))
        except (OSError, ValueError):
            break
        finally:
            os.close(descriptor)
    return forms
