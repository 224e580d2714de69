"""Which cases of a parametrised test `make test` runs, where the test is marked `product`.

Of such a test every value of every parameter is shown once, by as few cases as a greedy choice finds; the other cases,
the rest of the product, get the marker `matrix`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_products(items: Iterable[pytest.Item]) -> None:
    """Adds the marker `matrix` to the cases that show no value which another chosen case does not show."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("product") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        chosen = covering([values_of(case) for case in cases])
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker("matrix")


def values_of(case: pytest.Function) -> frozenset[tuple[str, str]]:
    """Each `parametrize` mark of a case, by its names, with the values that the case takes of it."""
    call = getattr(case, "callspec", None)
    if call is None:
        return frozenset()
    marks = (mark.args[0] for mark in case.iter_markers("parametrize"))
    names = [argument.split(",") if isinstance(argument, str) else argument for argument in marks]
    every = [[name.strip() for name in group] for group in names]
    return frozenset((",".join(group), repr([call.params.get(name) for name in group])) for group in every)


def covering(cases: list[frozenset[tuple[str, str]]]) -> set[int]:
    """The places of cases that together show all values; the one that shows most new ones is taken first."""
    missing: frozenset[tuple[str, str]] = frozenset().union(*cases)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(cases[index] & missing), -index))
        chosen.add(best)
        missing -= cases[best]
    return chosen or {0}
