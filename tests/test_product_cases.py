"""Which cases show every value of every parameter."""

from __future__ import annotations

from itertools import product

from tests.product_cases import covering


def test_every_value_is_shown_by_few_cases() -> None:
    cases = [frozenset(enumerate(values)) for values in product(range(3), range(4), range(2))]
    named = [frozenset((str(name), value) for name, value in case) for case in cases]
    chosen = covering(named)
    assert frozenset().union(*(named[index] for index in chosen)) == frozenset().union(*named)
    assert len(chosen) == 4  # as many as the longest parameter has values


def test_rows_that_no_other_shows_are_all_chosen() -> None:
    rows = [frozenset({("row", index)}) for index in range(5)]
    assert covering(rows) == set(range(5))


def test_a_test_without_parameters_is_chosen() -> None:
    assert covering([frozenset()]) == {0}
