"""Which families `make test` runs the long tests of: those whose rows in the table show a trait that no other shows."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from frame.testing.families import FAMILIES

#: The parameters of tests that are names of rows.
_PARAMETERS = ("family", "checkpoint")


#: Rows with ALiBi, whose contexts devices cannot share.
ALIBI = ("falcon-rw", "bloom", "bloom-post-norm", "mpt", "mpt-plain")


def mark_families(items: Iterable[pytest.Item]) -> None:
    """Adds the marker `matrix` to cases of rows that are `in_matrix`, but in tests that are marked `every_family`.

    In tests that are marked `few_families`, of what no family does in its own way, they get the marker `slow`.
    """
    for item in items:
        if item.get_closest_marker("every_family") is not None:
            continue
        call = getattr(item, "callspec", None)
        names = [call.params.get(name) for name in _PARAMETERS] if call is not None else []
        if any(isinstance(name, str) and name in FAMILIES and FAMILIES[name].in_matrix for name in names):
            item.add_marker("matrix" if item.get_closest_marker("few_families") is None else "slow")
