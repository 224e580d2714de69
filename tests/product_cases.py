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


def values_of(case: pytest.Function) -> frozenset[tuple[str, int]]:
    """Each parameter of a case with the place of its value among the parameter's values."""
    call = getattr(case, "callspec", None)
    return frozenset(call.indices.items()) if call is not None else frozenset()


def covering(cases: list[frozenset[tuple[str, int]]]) -> set[int]:
    """The places of cases that together show all values; the one that shows most new ones is taken first."""
    missing = frozenset().union(*cases)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(cases[index] & missing), -index))
        chosen.add(best)
        missing -= cases[best]
    return chosen or {0}
