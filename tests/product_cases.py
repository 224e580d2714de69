"""Which cases of a parametrised test `make test` runs, where the test is marked `product` or `some`.

Of a `product` every value of every parameter is shown once, by as few cases as a greedy choice finds; of one that is
marked `some(n)`, n cases are, from the first to the last at even distances. The others get the marker `matrix`.
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


def mark_others(items: Iterable[pytest.Item]) -> None:
    """Adds the marker `matrix` to the cases that are none of the `some` that their test shows."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("some") is not None and item.get_closest_marker("matrix") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("some")
        shown = spread(len(cases), 1 if mark is None else mark.args[0])
        for index, case in enumerate(cases):
            if index not in shown:
                case.add_marker("matrix")


def spread(count: int, most: int) -> set[int]:
    """At most `most` of the numbers below `count`, from 0 to the last at even distances."""
    return {round(index * (count - 1) / max(1, most - 1)) for index in range(most)} if count > most else {*range(count)}


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
