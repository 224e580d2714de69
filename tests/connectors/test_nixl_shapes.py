"""Two engines of other ranks and block sizes, over fake workers, with real agents: what travels and what is refused."""

from __future__ import annotations

import random

import pytest

from frame.interfaces import BlockFormat
from frame.plugins.connectors.nixl import (
    agent as nixl_agent,
    holds as nixl_holds,
    shapes as nixl_shapes,
    worker as nixl_worker,
)
from frame.testing.engines import request
from frame.testing.fake_cache import expected_tokens, make_layout
from tests.connectors.nixl_pairs import Pairs, counter, travelling

pytest.importorskip("nixl")


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    yield made
    made.close()


MLA = {"windows": (), "latents": 2}
#: One engine, the other, how many of 41 tokens travel.
SHAPES = {
    "one rank feeds two": ({}, {"ranks": 2}, 40),
    "two ranks feed one": ({"ranks": 2}, {}, 40),
    "one rank feeds two with windows": ({"windows": (0, 6)}, {"windows": (0, 6), "ranks": 2}, 40),
    "two ranks feed one with windows": ({"windows": (0, 6), "ranks": 2}, {"windows": (0, 6)}, 40),
    "chunks": ({"chunks": (10,)}, {"chunks": (10,), "ranks": 2}, 40),
    "latents for two ranks": (MLA, {**MLA, "ranks": 2}, 40),
    "latents of two ranks": ({**MLA, "ranks": 2}, MLA, 40),
    "latents beside heads": ({"latents": 2}, {"latents": 2, "ranks": 2}, 40),
    "two ranks feed four": ({"ranks": 2}, {"ranks": 4, "heads": 2}, 40),
    "four ranks feed two": ({"ranks": 4, "heads": 2}, {"ranks": 2}, 40),
    "four ranks feed one": ({"ranks": 4, "heads": 2}, {}, 40),
    "longer blocks": ({}, {"block_size": 8}, 40),
    "much longer blocks": ({"block_size": 1}, {"block_size": 16}, 40),
    "shorter blocks": ({"block_size": 8}, {"block_size": 4}, 40),
    "blocks of one token": ({"block_size": 16}, {"block_size": 1}, 40),
    "shorter blocks with windows": ({"block_size": 8, "windows": (0, 6)}, {"block_size": 2, "windows": (0, 6)}, 40),
    "longer blocks on two ranks": ({}, {"block_size": 8, "ranks": 2}, 40),
    "shorter blocks of two ranks": ({"block_size": 8, "ranks": 2}, {"block_size": 4}, 40),
    "groups of their own sizes": ({"windows": (0, 6), "strides": (1, 2)}, {"windows": (0, 6), "strides": (2, 1)}, 40),
}


#: Those that others show, too: `make matrix` has them.
OFTEN = {"latents of two ranks", "chunks", "two ranks feed four", "four ranks feed one", "longer blocks on two ranks"}
OFTEN |= {"one rank feeds two", "blocks of one token", "two ranks feed one", "longer blocks", "latents beside heads"}
CASES = [
    pytest.param(*shapes, id=name, marks=[pytest.mark.matrix] if name in OFTEN else [])
    for name, shapes in SHAPES.items()
]


def layout_of(shape):
    """With `heads` these are divided over so many ranks, and the others hold the same."""
    ranks = shape.get("heads", shape.get("ranks", 1))
    tokens = 64 * 4 if "block_size" not in shape else 640 // shape["block_size"] + 64
    return make_layout(tokens, **{**{name: one for name, one in shape.items() if name != "heads"}, "ranks": ranks})


def engines(pairs, first, second, **settings):
    return [pairs.engine(layout_of(one), ranks=one.get("ranks", 1), **settings) for one in (first, second)]


@pytest.mark.some(4)
@pytest.mark.parametrize(("first", "second", "travel"), CASES)
def test_engines_of_other_shapes(pairs, first, second, travel):
    there, here = engines(pairs, first, second)
    prompt = pairs.prompt(41)
    for name, lent in (("d", prompt), ("longer", prompt + pairs.prompt(20, seed=3))):
        params = pairs.prefill(there, f"p-{name}", lent)
        cached = pairs.decode(here, name, lent, params)
        assert cached == (travel if name == "d" else travelling(len(lent), here.layout))
    assert counter(here, "loaded_blocks") > 0
    assert counter(here, "failed_blocks") == 0
    pairs.rest(there, here)


@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(10, 30))])
def test_random_lives_of_two_shapes(pairs, seed):
    """With preemptions, aborts, chunks, and beginnings that are here already, of which others go on."""
    draw = random.Random(seed)
    shape = draw.choice([{"windows": (0, 6)}, {"windows": (0, 21)}, {"chunks": (10,)}, {"windows": (), "latents": 2}])
    sizes, ranks = draw.choice([(4, 8), (8, 4), (2, 16), (16, 2), (4, 4)]), draw.choice([(1, 2), (2, 1), (1, 1)])
    there, here = (
        pairs.engine(
            make_layout(room // size, size, ranks=count, **shape),
            ranks=count,
            max_num_batched_tokens=draw.choice([16, 48, 64]),
            options={"host_buffer": draw.random() < 0.3},
        )
        for count, size, room in zip(ranks, sizes, (800, 400), strict=True)
    )
    gone = set()
    for number in range(20):
        # one of three stems, cut anywhere, and perhaps an end of its own
        prompt = pairs.prompt(draw.randrange(1, 50), seed=draw.randrange(3))
        prompt += pairs.prompt(draw.choice([0, 0, draw.randrange(1, 8)]), seed=10 + number)
        travels = draw.random() < 0.7
        params = pairs.prefill(there, f"p{number}", prompt) if travels else None
        pairs.add(here, f"d{number}", prompt, params, draw.randrange(1, 14))
        for _ in range(draw.randrange(6)):
            there.step(), here.step()
        if draw.random() < 0.2:
            here.engine.abort([f"d{number}"])
            gone.add(f"d{number}")
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check(*(set(here.requests) - gone))
    there.check()
    assert counter(here, "failed_blocks") == 0


def test_one_reader_that_fails_costs_the_computation_on_all_ranks(pairs, monkeypatch):
    """One rank of two has its blocks: what the other lacks is computed, and the other side gives all back at once."""
    there, here = engines(pairs, {"ranks": 2}, {"ranks": 2})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    begin = nixl_agent.Agent._begin

    def broken(agent, read):
        if agent is here.workers.made[1].transfer.inner._agent:
            return agent._fail(read, "it broke")
        return begin(agent, read)

    monkeypatch.setattr(nixl_agent.Agent, "_begin", broken)
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") == 10


@pytest.mark.parametrize("lost", [0, 1])
def test_one_of_two_sources_that_fails_is_waited_for_and_computed(pairs, monkeypatch, lost):
    """A rank that reads from two others takes the load for ended when both reads have, and for failed if one has."""
    there, here = engines(pairs, {"ranks": 2}, {})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    begin, begun = nixl_agent.Agent._begin, []

    def broken(agent, read):
        begun.append(read.notice)
        return agent._fail(read, "it broke") if len(begun) == lost + 1 else begin(agent, read)

    monkeypatch.setattr(nixl_agent.Agent, "_begin", broken)
    pairs.decode(here, "d", pairs.prompt(40), params)
    pairs.rest(there, here)
    assert (len(set(begun)), counter(here, "failed_blocks"), counter(here, "loaded_blocks")) == (2, 10, 0)


def test_blocks_go_back_only_when_all_readers_have_read(pairs, monkeypatch):
    """Four readers, two on each rank: none of the ranks gives its blocks back after the first of them."""
    there, here = engines(pairs, {"ranks": 2}, {"ranks": 4, "heads": 2})
    params = pairs.prefill(there, "p", pairs.prompt(41))
    seen, read = [], nixl_holds.Holds.read

    def spy(holds, notice):
        read(holds, notice)
        seen.append((notice.reader, notice.num_readers, bool(holds.collect()) and there.held))

    monkeypatch.setattr(nixl_holds.Holds, "read", spy)
    pairs.decode(here, "d", pairs.prompt(41), params)
    pairs.until(lambda: len(seen) == 4, there)
    assert sorted(one[:2] for one in seen) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [one[2] for one in seen] == [False, False, False, ["p"]]


def test_a_prompt_too_short_for_a_long_block_is_given_back(pairs):
    there, here = engines(pairs, {"block_size": 4}, {"block_size": 16})
    params = pairs.prefill(there, "p", pairs.prompt(9))
    assert params is not None
    assert pairs.decode(here, "d", pairs.prompt(9), params) == 0
    pairs.rest(there, here)


def test_a_window_that_begins_before_the_blocks_that_are_kept_is_computed(pairs):
    """The prefill engine gave back what its own, shorter last block does not need; the longer one would need it."""
    shape = {"windows": (0, 6)}
    found = []
    for tokens in (8, 64):
        there, here = engines(
            pairs, {**shape, "block_size": 2}, {**shape, "block_size": 16}, max_num_batched_tokens=tokens
        )
        for length in (42, 36):
            prompt = pairs.prompt(length, seed=length)
            found.append(pairs.decode(here, f"d{length}", prompt, pairs.prefill(there, f"p{length}", prompt)))
        pairs.rest(there, here)
    assert found == [0, 0, 41, 35]


def test_a_replayed_request_reads_whole_blocks_only_where_its_window_before_them_is_kept(pairs):
    """It reads less than was granted, and so tokens of the window that the prefill engine may have given back."""
    shape, prompt, found = {"windows": (0, 6)}, pairs.prompt(48), []
    want = expected_tokens(prompt, 8)
    for tokens in (4, 64):
        there, here = engines(
            pairs, {**shape, "block_size": 2}, {**shape, "block_size": 8}, max_num_batched_tokens=tokens
        )
        again = request("d", prompt, 8)
        again.kv_transfer, again.output_ids = pairs.prefill(there, "p", prompt), want[:3]
        here.add(again)
        pairs.finish(here, "d")
        assert here.tokens("d") == want[3:]
        found.append(here.num_cached("d"))
    assert found == [0, 40]


def test_a_long_block_of_which_the_other_side_kept_a_part_is_not_taken(pairs):
    """A later request could find it by its hash and read the part that never came."""
    shape = {"windows": (0, 21)}
    there, here = engines(pairs, {**shape, "block_size": 4}, {**shape, "block_size": 16}, max_num_batched_tokens=48)
    prompt = pairs.prompt(50)
    here.run(request("before", prompt[:17]))
    assert pairs.decode(here, "d", prompt, pairs.prefill(there, "p", prompt)) in (16, 48)
    here.run(request("after", [*prompt[:33], 1, 2, 3]))
    assert here.num_cached("after") > 0
    pairs.rest(there, here)


def test_a_backend_that_does_not_say_where_tokens_or_heads_lie_serves_equal_engines(pairs, monkeypatch, caplog):
    of = nixl_shapes.RankShape.of

    def silent(views):
        made = []
        for name, view in views:
            one = view.format
            kept = BlockFormat(one.shape, one.order, one.dtype, one.block_axis)
            made.append((name, type(view)(view.bytes, kept, view.group, None, view.total_heads)))
        return of(made)

    monkeypatch.setattr(nixl_shapes.RankShape, "of", silent)
    for first, second, travel in (({"ranks": 2}, {"ranks": 2}, 40), ({}, {"block_size": 8}, 0), ({"ranks": 2}, {}, 0)):
        there, here = engines(pairs, first, second)
        params = pairs.prefill(there, "p", pairs.prompt(41))
        assert pairs.decode(here, "d", pairs.prompt(41), params) == travel
        here.check()
    assert "the axes of a block, of its attention backend, of layer group0.layer0: 2x4x2x4 at the prefill engine" in (
        caplog.text
    )


def test_a_request_alone_on_two_ranks_is_not_disturbed(pairs):
    there, here = engines(pairs, {}, {"ranks": 2})
    here.run(request("alone", pairs.prompt(30)))
    params = pairs.prefill(there, "p", pairs.prompt(41))
    assert pairs.decode(here, "d", pairs.prompt(41), params) == 40
    assert counter(here, "loaded_blocks") == 2 * 3
    pairs.rest(there, here)


def test_the_seconds_of_workers_that_read_at_the_same_time_count_once(pairs, monkeypatch):
    told, count = [], nixl_worker._count

    def watched(counters, name, value):
        told.append(name)
        count(counters, name, value)

    monkeypatch.setattr(nixl_worker, "_count", watched)
    there, here = (pairs.engine(make_layout(ranks=2), ranks=2) for _ in range(2))
    prompt = pairs.prompt(22)
    assert pairs.decode(here, "d", prompt, pairs.prefill(there, "p", prompt)) == 21
    assert told.count("nixl_loaded_bytes") == 2
    assert told.count("nixl_load_seconds") == 1
