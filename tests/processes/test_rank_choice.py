"""Which of several engines gets a request: the one with the least work, or the one that has the prompt's beginning."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, strategies as st

from frame.interfaces import EngineRequest, SamplingParams
from frame.ranks import homes
from frame.ranks.choice import CHUNK, MOST_CHUNKS, PREFILL_COST, RankChoice


def request(ids: np.ndarray, max_tokens: int = 100, salt: str | None = None) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_ids=ids, params=SamplingParams(), max_tokens=max_tokens, seed=0, salt=salt
    )


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_000, length, dtype=np.int32)


def place(choice: RankChoice, one: EngineRequest, ranks: range) -> int:
    rank = choice.choose(one, ranks)
    choice.begin(rank, choice.cost(one))
    return rank


def test_equal_requests_are_spread_evenly() -> None:
    choice = RankChoice(4)
    ranks = [place(choice, request(prompt(50, seed)), range(4)) for seed in range(40)]
    assert [ranks.count(rank) for rank in range(4)] == [10] * 4


def test_an_idle_server_takes_turns() -> None:
    choice = RankChoice(3)
    assert [choice.choose(request(prompt(9, seed)), range(3)) for seed in range(6)] == [1, 2, 0, 1, 2, 0]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 2000)), min_size=2, max_size=60),
    st.integers(2, 5),
)
def test_no_engine_has_much_more_to_do_than_another(sizes: list[tuple[int, int]], num_ranks: int) -> None:
    choice = RankChoice(num_ranks)
    loads, costs = [0.0] * num_ranks, []
    for seed, (length, most) in enumerate(sizes):
        one = request(prompt(length, seed), most)
        costs.append(choice.cost(one))
        loads[place(choice, one, range(num_ranks))] += costs[-1]
    assert max(loads) - min(loads) <= max(costs)


def test_a_long_prompt_goes_where_its_beginning_is() -> None:
    choice = RankChoice(4)
    first = prompt(4 * CHUNK)
    held = place(choice, request(first), range(4))
    for seed in range(1, 9):
        place(choice, request(prompt(20, seed)), range(4))
    longer = np.concatenate((first, prompt(90, 99)))
    assert choice.choose(request(longer), range(4)) == held
    assert choice.choose(request(longer, salt="another key"), range(4)) != held, "its blocks have other hashes"


def test_a_beginning_outweighs_only_the_work_that_it_saves() -> None:
    choice = RankChoice(2)
    first = prompt(2 * CHUNK)
    held = place(choice, request(first), range(2))
    choice.begin(held, PREFILL_COST * 2 * CHUNK + choice.cost(request(first)))
    assert choice.choose(request(first), range(2)) != held


def test_what_a_longer_prompt_left_is_found_by_shorter_and_longer_ones() -> None:
    whole = prompt(3 * CHUNK * MOST_CHUNKS)
    for other in (whole[: CHUNK * MOST_CHUNKS], np.concatenate((whole, whole))):
        choice = RankChoice(8)
        held = choice.choose(request(whole), range(8))
        assert choice.choose(request(other), range(8)) == held


def test_without_prefix_caching_no_beginning_counts() -> None:
    choice = RankChoice(2, cached=False)
    one = request(prompt(4 * CHUNK))
    assert {place(choice, one, range(2)) for _ in range(2)} == {0, 1}


def test_only_engines_that_serve_are_chosen() -> None:
    choice = RankChoice(4)
    assert {place(choice, request(prompt(9, seed)), [1, 3]) for seed in range(6)} == {1, 3}


def test_processes_know_of_each_others_work_and_a_successor_begins_without() -> None:
    memory = os.memfd_create("test")
    first, second = RankChoice(2, memory, 0), RankChoice(2, memory, 1)
    first.begin(0, 1000.0)
    assert {second.choose(request(prompt(9, seed)), range(2)) for seed in range(4)} == {1}
    long = prompt(2 * CHUNK)
    held = second.choose(request(long), range(2))
    assert first.choose(request(long), range(2)) == held
    RankChoice(2, memory, 0)
    assert {second.choose(request(prompt(9, seed)), range(2)) for seed in range(4)} == {0, 1}
    os.close(memory)


def test_outputs_are_taken_to_be_as_long_as_those_that_ended() -> None:
    choice = RankChoice(1)
    before = choice.cost(request(prompt(10), max_tokens=10_000))
    for _ in range(500):
        choice.begin(0, 1.0)
        choice.end(0, 1.0, 2000)
    assert before < 300
    assert 1900 < choice.cost(request(prompt(10), max_tokens=10_000)) <= 2010
    assert choice.cost(request(prompt(10), max_tokens=5)) == 15


def test_homes_are_those_of_the_newest_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "MOST", 2)
    kept = homes.Homes[int]()
    for place, name in enumerate("abca"):
        kept.note(name, place)
    assert [kept.take(name) for name in ("b", "c", "a", "a", "", None)] == [None, 2, 3, None, None, None]


def test_what_an_encoder_reads_is_work_and_tells_decoder_prompts_apart() -> None:
    def both(read: int, begun: np.ndarray) -> EngineRequest:
        one = request(begun)
        one.encoder_ids = prompt(read, read)
        return one

    choice, start = RankChoice(2), np.zeros(1, np.int32)
    ranks = [place(choice, both(2000 if number == 0 else 10, start), range(2)) for number in range(8)]
    assert ranks.count(ranks[0]) == 1
    choice, begun = RankChoice(2), prompt(2 * CHUNK)
    first = choice.choose(both(10, begun), range(2))
    assert choice.choose(both(10, begun), range(2)) == first
    assert choice.choose(both(11, begun), range(2)) != first
