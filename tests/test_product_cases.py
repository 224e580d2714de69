"""Which cases show every value of every parameter."""

from __future__ import annotations

from itertools import product

import pytest

from tests.product_cases import covering, spread, values_of


def test_every_value_is_shown_by_few_cases() -> None:
    cases = product(range(3), range(4), range(2))
    named = [frozenset((str(name), str(value)) for name, value in enumerate(case)) for case in cases]
    chosen = covering(named)
    assert frozenset().union(*(named[index] for index in chosen)) == frozenset().union(*named)
    assert len(chosen) == 4  # as many as the longest parameter has values


def test_rows_that_no_other_shows_are_all_chosen() -> None:
    rows = [frozenset({("row", str(index))}) for index in range(5)]
    assert covering(rows) == set(range(5))


def test_a_test_without_parameters_is_chosen() -> None:
    assert covering([frozenset()]) == {0}


@pytest.mark.product
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize(("second", "third"), [(1, "a"), (2, "b")])
def test_a_product_is_cut_to_its_longest_parameter(
    request: pytest.FixtureRequest, first: int, second: int, third: str
) -> None:
    names = {name for name, _ in values_of(request.node)}
    assert names == {"first", "second,third"}


def test_some_are_spread_from_the_first_to_the_last() -> None:
    assert spread(10, 4) == {0, 3, 6, 9}
    assert spread(3, 5) == {0, 1, 2}
    assert spread(9, 1) == {0}


@pytest.mark.some(2)
@pytest.mark.parametrize("number", range(5))
def test_one_of_some_is_shown(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("matrix") is None) == (number in (0, 4))
