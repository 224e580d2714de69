"""Copies blocks out of the files of engines that divide the model over other ranks, for the worker side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..blocks.files import BlockFiles
from .disk_forms import DiskForms, EngineForms
from .row_forms import Piece, RowForm, copy_pieces, pieces_of


class ForeignFiles:
    """For the worker with rows of this `form`, from `files` of engines that `forms` has records of."""

    def __init__(self, files: BlockFiles, forms: DiskForms, form: RowForm) -> None:
        self._files = files
        self._forms = forms
        self._form = form
        self._plans: dict[str, tuple[EngineForms, Mapping[int, list[Piece]]]] = {}

    def take(self, name: str, keys: Sequence[bytes], rows: Sequence[Tensor]) -> bool:
        """Fills each of `rows` uint8 [row_bytes] from the files `keys` of an engine; False where one is not sound."""
        engine = self._forms.of(name)
        plan = None if engine is None else self._plan(name, engine)
        if engine is None or plan is None:
            return False
        spaces = engine.spaces(name)
        for key, row in zip(keys, rows, strict=True):
            for place, pieces in plan.items():
                form = engine.workers[place].rows
                if not self._files.holds(spaces[place], key, form.row_bytes):
                    return False  # before memory is taken for what a record says
                theirs = torch.empty(form.row_bytes, dtype=torch.uint8)
                if not self._files.read(spaces[place], key, theirs.numpy(), remove=False):
                    return False
                copy_pieces(pieces, self._form, row, {place: (form, theirs)})
        return True

    def _plan(self, name: str, engine: EngineForms) -> Mapping[int, list[Piece]] | None:
        """What to take from which worker."""
        known = self._plans.get(name)
        if known is not None and known[0] is engine:
            return known[1]
        pieces = pieces_of(self._form, engine.forms)
        if pieces is None:
            return None
        plan = {place: [one for one in pieces if one.place == place] for place in {one.place for one in pieces}}
        self._plans[name] = engine, plan
        return plan
