"""What several workers answer or know makes one result, and one KV cache."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from frame.core.engine.agreement import agreed_layout, numerics
from frame.interfaces import FullKV, Mesh, StateKV, StepResult, TransferReport, WorkerDescription, WorkerFacts
from frame.transfers.merging import ResultMerge
from tests.engine.simulation import make_config

TWO = Mesh(tensor=2)


def result(token: int, **report: object) -> StepResult:
    tokens = np.full((1, 1), token, np.int32)
    return StepResult(
        step=1, token_ids=tokens, num_tokens=np.ones(1, np.int32), transfer=TransferReport(**report), failed={}
    )


def facts(kv_bytes: int = 1 << 16, digest: str = "a") -> WorkerFacts:
    return WorkerFacts(
        kv_specs={"layer": FullKV(num_kv_heads=1, head_dim=8, dtype="float32")},
        kv_bytes=kv_bytes,
        pool_bytes=(1024,),
        digest=digest,
        model="m",
        described=WorkerDescription(platform="cpu", dtype="float32", attention=["torch"]),
    )


def test_one_answer_passes_untouched() -> None:
    only = result(3, sent=["a"])
    assert ResultMerge(1).merge([only]) is only


def test_tokens_are_the_first_answers() -> None:
    merged = ResultMerge(2).merge([result(3), result(4)])
    assert merged.token_ids.tolist() == [[3]]


def test_a_transfer_has_ended_once_all_workers_say_so() -> None:
    merge = ResultMerge(2)
    early = merge.merge([result(1, sent=["a"], received=["b"]), result(1, received=["b"])]).transfer
    late = merge.merge([result(1), result(1, sent=["a"])]).transfer
    assert early is not None
    assert late is not None
    assert (early.sent, early.received) == ([], ["b"])
    assert (late.sent, late.received) == (["a"], [])
    again = merge.merge([result(1, sent=["a"]), result(1)]).transfer
    assert again is not None
    assert again.sent == [], "a request of the same name is another one"


def test_a_load_that_one_worker_gives_up_is_given_up_at_once_and_ends_with_the_last() -> None:
    merge = ResultMerge(2)
    given_up = merge.merge([result(1, given_up=["a"]), result(1, received=["a"])]).transfer
    over = merge.merge([result(1, received=["a"]), result(1)]).transfer
    assert given_up is not None
    assert over is not None
    assert (given_up.given_up, given_up.received) == (["a"], [])
    assert (over.given_up, over.received) == ([], ["a"])


def test_a_rank_that_names_an_id_twice_does_not_speak_for_the_others() -> None:
    merge = ResultMerge(2)
    twice = merge.merge([result(1, sent=["a", "a"], received=["b"], events=[b"e", b"e"]), result(1)]).transfer
    again = merge.merge([result(1, sent=["a"], received=["b"]), result(1)]).transfer
    other = merge.merge([result(1), result(1, sent=["a"], received=["b"], events=[b"e"])]).transfer
    assert twice is not None
    assert again is not None
    assert other is not None
    assert (twice.sent, twice.received, twice.events) == ([], [], [])
    assert (again.sent, again.received) == ([], [])
    assert (other.sent, other.received, other.events) == (["a"], ["b"], [b"e"])


def test_a_late_name_of_a_released_id_changes_nothing() -> None:
    awaited = {"a"}
    merge = ResultMerge(2, awaited.__contains__)
    merge.merge([result(1, sent=["a"]), result(1, sent=["a"])])
    awaited.clear()
    merge.merge([result(1, sent=["a"]), result(1)])  # the engine has given its blocks back
    awaited.add("a")  # a later request of that name
    early = merge.merge([result(1), result(1, sent=["a"])]).transfer
    awaited.clear()  # released without the word of rank 0
    merge.merge([result(1), result(1)])
    awaited.add("a")
    third = merge.merge([result(1, sent=["a"]), result(1)]).transfer
    assert early is not None
    assert third is not None
    assert (early.sent, third.sent) == ([], [])


def test_failures_of_any_worker_count_once() -> None:
    answers = [result(1, failed_blocks=[(0, 4), (0, 2)]), result(1, failed_blocks=[(0, 2), (1, 9)])]
    answers[1].failed[0] = "not finite"
    merged = ResultMerge(2).merge(answers)
    assert merged.transfer is not None
    assert merged.transfer.failed_blocks == [(0, 2), (0, 4), (1, 9)]
    assert merged.failed == {0: "not finite"}


def test_counts_are_added_and_gauges_the_largest() -> None:
    answers = [result(1, counters={"loads": 1.0}, gauges={"held": 2.0}, notes=[(0, b"x")])]
    answers.append(result(1, counters={"loads": 2.0, "saves": 1.0}, gauges={"held": 1.0}, events=[b"stored"]))
    merge = ResultMerge(2)
    merged = merge.merge(answers).transfer
    assert merged is not None
    assert (merged.counters, merged.gauges) == ({"loads": 3.0, "saves": 1.0}, {"held": 2.0})
    assert (merged.notes, merged.events) == ([(0, b"x")], [])
    later = merge.merge([result(1, events=[b"stored"]), result(1)]).transfer
    assert later is not None
    assert later.events == [b"stored"], "an event counts once all workers gave it"


def test_a_missing_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 workers answered a step"):
        ResultMerge(2).merge([result(1)])


def test_the_poorest_worker_decides_how_many_blocks_there_are() -> None:
    config = make_config(num_gpu_blocks_override=None)
    rich, poor = (agreed_layout(config, Mesh(), [facts(size)]) for size in (1 << 16, 1 << 14))
    both = agreed_layout(config, TWO, [facts(1 << 16), facts(1 << 14)])
    assert rich.pools > poor.pools == both.pools


def test_a_stage_that_keeps_states_alone_does_not_decide_how_many_blocks_there_are() -> None:
    config = make_config(num_gpu_blocks_override=None, max_num_seqs=4)
    specs = {"a": FullKV(num_kv_heads=2, head_dim=16, dtype="float32"), "s": StateKV(state_bytes=1024)}
    room = {"kv_specs": specs, "kv_bytes": 1 << 18}
    first, second = (msgspec.structs.replace(facts(), **room, pool_bytes=one) for one in ((0, 1024), (4096, 0)))
    layout = agreed_layout(config, TWO, [first, second])
    assert layout.pools == ((1 << 18) // 4096, 1 + 4 + 16 * 4), (
        "each pool is as large as those that keep it there allow"
    )


def test_a_lost_worker_ends_the_start() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 workers were loaded"):
        agreed_layout(make_config(), TWO, [facts()])


def test_blocks_are_shared_by_equal_workers_in_equal_meshes_alone() -> None:
    one, other = facts(), facts(digest="b")
    names = {
        numerics(Mesh(), [one]),
        numerics(Mesh(), [other]),
        numerics(TWO, [one, other]),
        numerics(TWO, [other, one]),
        numerics(Mesh(pipeline=2), [one, other]),
    }
    assert len(names) == 5
    assert numerics(Mesh(data=2), [one]) == numerics(Mesh(), [one])
    assert numerics(Mesh(), [msgspec.structs.replace(one, kv_bytes=1)]) == numerics(Mesh(), [one])
