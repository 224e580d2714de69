from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from frame.core.engine.request import QueueFullError
from frame.core.interfaces.engine import PromptEmbeds
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import StepResult, TransferReport
from frame.plugins.schedulers.priority import PriorityPolicy
from frame.testing.fake_cache import BAD, next_token, prefixes_of
from frame.testing.fake_worker import BrokenStepError
from tests.engine.fake_connector import FakeConnector
from tests.engine.simulation import VOCAB, Simulation, expected, make_layout, make_request


def simulation(num_blocks: int = 100, windows: tuple[int | None, ...] = (None,), **fields: object) -> Simulation:
    return Simulation(layout=make_layout(num_blocks, 4, windows), **fields)


def rows(sim: Simulation, plan) -> dict[str, int]:
    names = [sim.worker.slots[slot].request_id for slot in plan.slots.tolist()]
    return dict(zip(names, plan.num_scheduled.tolist(), strict=True))


def schedule(sim: Simulation) -> dict[str, int]:
    """Launches one step and answers everything: request → tokens."""
    plan = sim.launch()
    found = {} if plan is None else rows(sim, plan)
    while sim.in_flight:
        sim.answer()
    return found


def test_running_requests_come_before_waiting_ones_within_the_budget():
    sim = simulation(max_num_batched_tokens=10)
    sim.add(make_request("a", [1] * 4))
    sim.add(make_request("b", [2] * 20))
    assert schedule(sim) == {"a": 4, "b": 6}
    sim.add(make_request("c", [3] * 4))
    assert schedule(sim) == {"a": 1, "b": 9}
    assert schedule(sim) == {"a": 1, "b": 5, "c": 4}


def test_rows_with_fewer_tokens_come_first():
    sim = simulation(max_num_batched_tokens=30)
    sim.add(make_request("a", [1] * 10))
    schedule(sim)
    sim.add(make_request("b", [2] * 8))
    sim.add(make_request("c", [3] * 5))
    assert list(schedule(sim)) == ["a", "c", "b"]


def test_no_more_requests_run_than_slots_are_there():
    sim = simulation(max_num_seqs=2)
    for name in "abc":
        sim.add(make_request(name, [ord(name)] * 3, max_tokens=3))
    assert set(schedule(sim)) == {"a", "b"}
    assert sim.scheduler.stats().waiting == 1
    sim.run()


def test_partial_and_long_prefills_are_limited():
    sim = simulation(
        max_num_batched_tokens=40,
        long_prefill_token_threshold=6,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
    )
    sim.add(make_request("long", [1] * 20))
    sim.add(make_request("longer", [2] * 30))
    sim.add(make_request("short", [3] * 5))
    # the second long one waits, the short one passes
    assert schedule(sim) == {"short": 5, "long": 6}
    assert schedule(sim) == {"short": 1, "long": 6}
    assert schedule(sim) == {"short": 1, "long": 6}
    assert schedule(sim) == {"short": 1, "long": 2, "longer": 6}


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own():
    sim = simulation(max_num_batched_tokens=10, enable_chunked_prefill=False)
    sim.add(make_request("a", [1] * 6))
    sim.add(make_request("b", [2] * 6))
    assert schedule(sim) == {"a": 6}
    assert schedule(sim) == {"a": 1, "b": 6}
    with pytest.raises(ValueError, match="has 11 tokens; without chunked prefill at most max_num_batched_tokens 10"):
        sim.add(make_request("c", [3] * 11))


def test_requests_that_can_never_run_are_refused_with_numbers():
    sim = simulation(num_blocks=6, max_model_len=40)
    with pytest.raises(ValueError, match="needs 7 blocks of 4 tokens for its 28 tokens, the KV cache has 5"):
        sim.add(make_request("a", [1] * 20))
    sim.add(make_request("a", [1] * 13))
    with pytest.raises(ValueError, match="'a' is there already"):
        sim.scheduler.add(make_request("a", [1]))
    with pytest.raises(ValueError, match="empty prompt"):
        sim.scheduler.add(make_request("b", []))
    with pytest.raises(ValueError, match="40 prompt and 0 output tokens, which leaves no room under max_model_len 40"):
        sim.scheduler.add(make_request("b", [1] * 40))
    sim.run()


def test_a_full_queue_refuses_more():
    sim = simulation(max_num_seqs=1, max_queue=1)
    sim.add(make_request("a", [1]))
    with pytest.raises(QueueFullError, match="1 requests wait, max_queue allows 1"):
        sim.scheduler.add(make_request("b", [1]))
    for name, output_ids in (("begun", [2]), ("waited", [])):
        known = make_request(name, [1], max_tokens=3)
        known = msgspec.structs.replace(known, replayed=True, output_ids=output_ids)
        sim.scheduler.add(known)  # an earlier engine let it in, so it must go on
        sim.scheduler.abort([name])
    sim.launch()
    sim.add(make_request("b", [1]))
    sim.run()


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_lengths_are_never_passed_however_many_steps_are_out(max_in_flight):
    sim = simulation(max_in_flight=max_in_flight)
    request = make_request("a", [1, 2, 3], max_tokens=5)
    sim.add(request)
    sim.run()
    sim.check(request)
    assert sum(plan.num_tokens for plan in sim.plans) == 3 + 4


def stopping(fields: dict, where: int = 2) -> tuple[Simulation, list[int]]:
    """Runs one request whose `where`-th output token is given to `fields` as what stops it."""
    plain, _ = expected(make_request("a", [5, 6], max_tokens=12), 64)
    token = plain[where]
    sim = simulation()
    params = SamplingParams(max_tokens=12, **fields.get("params", lambda t: {})(token))
    sim.add(make_request("a", [5, 6], max_tokens=12, params=params, **fields.get("request", lambda t: {})(token)))
    sim.run()
    return sim, plain


def test_stop_tokens_end_a_request_and_late_tokens_are_dropped():
    sim, plain = stopping({"params": lambda token: {"stop_token_ids": [token]}})
    end = plain.index(plain[2]) + 1
    assert sim.tokens("a") == plain[:end]
    last = sim.outputs["a"][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", plain[2])


def test_eos_has_no_stop_reason_and_can_be_ignored():
    sim, _ = stopping({"request": lambda token: {"eos": (token,)}})
    assert (sim.outputs["a"][-1].finish_reason, sim.outputs["a"][-1].stop_reason) == ("stop", None)
    sim, plain = stopping({"request": lambda token: {"eos": (token,)}, "params": lambda token: {"ignore_eos": True}})
    assert sim.tokens("a") == plain
    assert sim.reason("a") == "length"


def test_min_tokens_holds_stops_back():
    sim, plain = stopping({"params": lambda token: {"stop_token_ids": list(range(12)), "min_tokens": 4}})
    assert sim.tokens("a") == plain[:4]


def test_a_replayed_request_continues_after_the_tokens_it_had_emitted():
    plain = make_request("a", [5, 6], max_tokens=8)
    tokens, _ = expected(plain, 64)
    sim = simulation()
    sim.add(make_request("a", [5, 6], max_tokens=8, output_ids=tokens[:3]))
    sim.run()
    assert sim.tokens("a") == tokens[3:]
    assert sim.plans[0].added[0].prompt_len == 2
    assert sim.plans[0].added[0].token_ids.tolist() == [5, 6, *tokens[:3]]


def test_the_second_of_two_equal_prompts_shares_blocks_and_says_so():
    sim = simulation()
    prompt = list(range(11))
    sim.add(make_request("a", prompt))
    schedule(sim)
    sim.add(make_request("b", prompt))
    assert schedule(sim) == {"a": 1, "b": 3}
    sim.run()
    assert [sim.outputs[name][0].num_cached for name in "ab"] == [0, 8]
    assert all(output.num_cached is None for output in sim.outputs["b"][1:])
    stats = sim.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (22, 8, 22)
    assert stats.generated_tokens == 16
    assert stats.finished == {"length": 2}
    assert stats.kv_usage == 0.0


def test_what_a_step_stores_of_one_token_is_not_shared_within_it():
    """Attention stores that token while it attends; of several it stores all before."""
    sim = simulation(long_prefill_token_threshold=1, max_num_partial_prefills=2, max_long_partial_prefills=2)
    prompt = list(range(11))
    sim.add(make_request("a", prompt))
    assert [schedule(sim) for _ in range(3)] == [{"a": 1}] * 3
    sim.add(make_request("b", prompt))
    assert schedule(sim) == {"a": 1, "b": 1}  # the fourth token of a block of four
    sim.add(make_request("c", prompt))
    schedule(sim)
    sim.run()
    assert [sim.outputs[name][0].num_cached for name in "abc"] == [0, 0, 8]


def test_generated_blocks_can_be_found_once_their_ids_are_known():
    sim = simulation()
    request = make_request("a", [1, 2, 3], max_tokens=10)
    sim.add(request)
    sim.run()
    tokens, _ = expected(request, 64)
    sim.add(make_request("b", [1, 2, 3, *tokens[:9], 4], max_tokens=2))
    sim.run()
    assert sim.outputs["b"][0].num_cached == 12


def test_salts_and_deterministic_requests_share_nothing_with_others():
    sim = simulation()
    prompt = list(range(9))
    fields = [{}, {"salt": "x"}, {"salt": "y"}, {"params": SamplingParams(max_tokens=8, deterministic=True)}]
    for number, extra in enumerate(fields):
        sim.add(make_request(str(number), prompt, **extra))
        sim.run()
    assert [sim.outputs[str(number)][0].num_cached for number in range(4)] == [0, 0, 0, 0]
    assert sim.plans[-1].deterministic
    assert not sim.plans[0].deterministic


def test_the_latest_request_gives_way_and_resumes_with_its_output():
    sim = simulation(num_blocks=8, max_in_flight=2)
    requests = [make_request(name, [number] * 8, max_tokens=12) for number, name in enumerate("ab")]
    for request in requests:
        sim.add(request)
    sim.run()
    for request in requests:
        sim.check(request)
    assert sim.scheduler.stats().preemptions > 0
    resumed = [new for plan in sim.plans for new in plan.added if new.request_id == "b"]
    assert len(resumed) > 1
    assert resumed[-1].prompt_len == 8
    assert len(resumed[-1].token_ids) > 8
    assert len([1 for plan in sim.plans for new in plan.added if new.request_id == "a"]) == 1


def test_the_lowest_priority_gives_way():
    sim = simulation(num_blocks=8, policy=PriorityPolicy)
    for name, priority in (("a", 1), ("b", 0)):
        sim.add(make_request(name, [priority] * 8, max_tokens=12, priority=priority))
    sim.run()
    assert len([1 for plan in sim.plans for new in plan.added if new.request_id == "a"]) > 1
    assert len([1 for plan in sim.plans for new in plan.added if new.request_id == "b"]) == 1


def test_a_prompt_that_gives_way_within_its_own_step_leaves_nothing_uncomputed_in_the_cache():
    chunks = {"long_prefill_token_threshold": 8, "max_num_partial_prefills": 2, "max_long_partial_prefills": 2}
    sim = simulation(num_blocks=10, policy=PriorityPolicy, **chunks)
    low = make_request("low", list(range(24)), max_tokens=2, priority=5)
    sim.add(low)
    assert schedule(sim) == {"low": 8}
    sim.add(make_request("high", [7] * 20, max_tokens=2, priority=0))
    assert schedule(sim) == {"low": 8, "high": 8}
    # "low" takes blocks 5 and 6, then "high" needs two and one is left
    assert schedule(sim) == {"high": 8}
    assert sim.scheduler._kv.pool.num_published == 4 + 4
    sim.run()
    sim.check(low)


def test_abort_reaches_waiting_running_and_in_flight_requests():
    sim = simulation(max_num_seqs=1)
    for name in "ab":
        sim.add(make_request(name, [1, 2, 3]))
    sim.launch()
    sim.launch()
    outputs = sim.collect(sim.scheduler.abort(["a", "b", "a", "unknown"]))
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "abort"), ("b", "abort")]
    assert not sim.scheduler.lifecycle.requests
    sim.run()
    assert sim.tokens("a") == []
    assert sim.scheduler.abort(["a"]) == []


def test_a_slot_is_named_as_removed_when_its_last_step_was_answered():
    sim = simulation(max_num_seqs=2, max_in_flight=3)
    sim.add(make_request("a", [1, 2, 3], max_tokens=9))
    sim.add(make_request("b", [2, 2, 3], max_tokens=30))
    for _ in range(3):
        sim.launch()
    sim.collect(sim.scheduler.abort(["a"]))
    removed = []
    while sim.step():
        removed.append(sim.plans[-1].removed_slots.tolist())
    assert [slots for slots in removed if slots] == [[0]]
    assert removed[0] == removed[1] == []


def test_a_row_that_failed_ends_alone_and_leaves_nothing_in_the_cache():
    sim = simulation()
    sim.add(make_request("a", [1] * 9, max_tokens=4))
    sim.add(make_request("b", [2] * 9, max_tokens=4))
    plan = sim.launch()
    sim.in_flight[0][1].failed = {plan.slots.tolist().index(0): "logits are not finite"}
    sim.run()
    assert (sim.reason("a"), sim.outputs["a"][-1].error) == ("error", "logits are not finite")
    assert sim.reason("b") == "length"
    for name, cached in (("a2", 0), ("b2", 8)):
        sim.add(make_request(name, [1 if cached == 0 else 2] * 9))
        sim.run()
        assert sim.outputs[name][0].num_cached == cached


def test_a_row_without_its_token_is_an_error_not_a_hang():
    sim = simulation()
    sim.add(make_request("a", [1] * 3))
    plan = sim.scheduler.schedule()
    outputs = sim.scheduler.update(
        plan, StepResult(step=plan.step, token_ids=np.full((1, 1), -1, np.int32), num_tokens=np.zeros(1, np.int32))
    )
    assert [output.finish_reason for output in outputs] == ["error"]


def test_a_failed_step_withdraws_what_it_published():
    sim = simulation()
    sim.add(make_request("a", [1] * 9))
    sim.launch(breaks=True)
    sim.add(make_request("b", [1] * 9))
    sim.launch()
    assert sim.plans[-1].added[0].num_computed == 8
    sim.run()
    assert (sim.reason("a"), sim.outputs["a"][-1].error) == ("error", "the step broke")
    sim.check(make_request("b", [1] * 9))


def test_an_answer_to_an_unknown_step_is_refused():
    sim = simulation()
    sim.add(make_request("a", [1]))
    plan = sim.launch()
    sim.run()
    with pytest.raises(ValueError, match="step 0 is not in flight"):
        sim.scheduler.update(plan, StepResult(step=0, token_ids=np.zeros((1, 1)), num_tokens=np.zeros(1)))


def test_no_plan_is_made_without_work_or_above_the_limit_of_plans_in_flight():
    sim = simulation(max_in_flight=2)
    assert sim.scheduler.schedule() is None
    sim.add(make_request("a", [1], max_tokens=9))
    assert sim.launch() is not None
    assert sim.launch() is not None
    assert sim.scheduler.schedule() is None
    sim.run()
    assert sim.scheduler.schedule() is None


def test_the_prefix_cache_is_cleared_when_nothing_runs_or_all_is_preempted():
    sim = simulation()
    request = make_request("a", list(range(9)))
    sim.add(request)
    sim.launch()
    assert not sim.scheduler.reset_prefix_cache()
    sim.scheduler.preempt_all()
    assert sim.scheduler.reset_prefix_cache()
    assert sim.scheduler._kv.pool.num_published == 0
    sim.run()
    sim.check(request)
    assert sim.scheduler._kv.pool.num_published > 0
    assert sim.scheduler.reset_prefix_cache()
    sim.add(make_request("b", list(range(9))))
    sim.run()
    assert sim.outputs["b"][0].num_cached == 0


def test_sliding_layers_hold_only_their_window():
    sim = simulation(num_blocks=30, windows=(6,), max_model_len=64, max_num_batched_tokens=4)
    sim.add(make_request("a", [1] * 20, max_tokens=40))
    most = 0
    while sim.step():
        most = max(most, 29 - sim.scheduler._kv.pool.num_free)
    assert most <= 4
    sim.check_quiet()


def test_a_chunk_shrinks_to_what_a_tiny_pool_holds():
    sim = simulation(num_blocks=5, windows=(6,), max_num_batched_tokens=64)
    request = make_request("a", list(range(30)), max_tokens=8)
    sim.add(request)
    sim.run()
    sim.check(request)


def test_prompt_logprobs_come_once_even_after_preemption():
    params = SamplingParams(max_tokens=12, prompt_logprobs=0)
    sim = simulation(num_blocks=8, max_num_batched_tokens=5)
    sim.add(make_request("a", [1] * 8, max_tokens=12))
    sim.add(make_request("b", [2, 3] * 4, max_tokens=12, params=params))
    sim.run()
    assert sim.scheduler.stats().preemptions > 0
    ids = [o.prompt_logprobs.token_ids[:, 0].tolist() for o in sim.outputs["b"] if o.prompt_logprobs is not None]
    assert [token for chunk in ids for token in chunk] == [3, 2, 3, 2, 3, 2, 3]


def loading(later: bool, failing: tuple[int, ...] = (), policy: str = "recompute", **fields: object) -> Simulation:
    layout = make_layout(60)
    connector = FakeConnector(layout=layout, later=later, failing=failing, **fields)
    sim = Simulation(layout=layout, connector=connector, kv_load_failure_policy=policy)
    sim.add(make_request("a", list(range(13))))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sim.add(make_request("b", list(range(13))))
    sim.run()
    return sim


@pytest.mark.parametrize("later", [False, True])
def test_what_a_connector_has_is_loaded_not_computed(later):
    sim = loading(later)
    sim.check(make_request("b", list(range(13))))
    assert sim.outputs["b"][0].num_cached == 12
    assert [new.num_computed for plan in sim.plans for new in plan.added] == [0, 12]
    assert sim.worker.transfer.loads == 1


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("failing", "computed"), [((), 14), ((0,), 12)], ids=["arrives", "fails"])
def test_a_connector_may_have_all_tokens_but_the_last(later, failing, computed):
    prompt = list(range(15))
    layout = make_layout(60)
    connector = FakeConnector(layout=layout, later=later, ends=True, failing=failing)
    sim = Simulation(layout=layout, connector=connector)
    sim.add(make_request("a", prompt))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sim.add(make_request("b", prompt))
    sim.run()
    sim.check(make_request("b", prompt))
    assert connector.told == [("a", 0), ("b", 14)]
    assert [new.num_computed for plan in sim.plans for new in plan.added][-1] == computed
    # the block that was filled by both can be found
    sim.add(make_request("c", [*prompt, 1, 2, 3]))
    sim.run()
    sim.check(make_request("c", [*prompt, 1, 2, 3]))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("more", [-1, 1, 5])
def test_what_is_neither_whole_grains_nor_all_but_one_is_cut(later, more, monkeypatch):
    connector = FakeConnector(layout=make_layout(60), later=later, ends=True)
    sim = Simulation(layout=make_layout(60), connector=connector)
    sim.add(make_request("a", list(range(15))))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    monkeypatch.setattr(connector, "matched_tokens", lambda request, num_computed: (14 + more, later))
    sim.add(make_request("b", list(range(15))))
    sim.run()
    sim.check(make_request("b", list(range(15))))
    assert connector.told == [("a", 0), ("b", 12)]


@pytest.mark.parametrize("later", [False, True])
def test_blocks_that_did_not_arrive_are_recomputed(later):
    sim = loading(later, failing=(0,))
    sim.check(make_request("b", list(range(13))))
    # the blocks before the first bad one are kept
    assert [new.num_computed for plan in sim.plans for new in plan.added][-1] == 8
    assert sim.worker.transfer.loads == 1


@pytest.mark.parametrize("later", [False, True])
def test_a_request_whose_blocks_did_not_arrive_fails_when_the_policy_says_so(later):
    sim = loading(later, failing=(0,), policy="fail")
    assert sim.reason("b") == "error"
    assert "could not be loaded" in sim.outputs["b"][-1].error


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("method", ["matched_tokens", "allocated", "build_message", "finished", "update"])
def test_a_connector_that_raises_costs_its_help_and_nothing_else(method, later, monkeypatch, caplog):
    layout = make_layout(60)
    connector = FakeConnector(layout=layout, later=later)
    sim = Simulation(layout=layout, connector=connector)
    sim.add(make_request("a", list(range(13))))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sound = getattr(connector, method)

    def once(*arguments):
        if method == "build_message":  # that step reads what nobody loads, and its tokens are dropped
            for position in range(12):
                block = connector.messages[0].blocks[0][position // 4]
                sim.worker.put(0, block, position, BAD)
        monkeypatch.setattr(connector, method, sound)
        raise KeyError("a bug")

    monkeypatch.setattr(connector, method, once)
    requests = [make_request("b", list(range(13))), make_request("c", [7, 8, 9] * 4)]
    for request in requests:
        sim.add(request)
    sim.run()
    for request in requests:
        sim.check(request)
    assert f"the KV connector failed in {method}" in caplog.text


def test_what_a_connector_counts_is_added_up_and_what_it_misnames_is_logged_once(caplog):
    sim = Simulation(layout=make_layout(60), connector=FakeConnector(layout=make_layout(60)))
    for saved, kept in ((2, 5), (3, 4)):
        counters = {"saved_blocks": saved, "Bad name": 1, "broken": float("nan")}
        gauges = {"kept_blocks": kept, "of_text": "many"}
        sim.scheduler._transfers.report(TransferReport(counters=counters, gauges=gauges), SimpleNamespace(step=saved))
    stats = sim.scheduler.stats()
    assert stats.connector_counters == {"saved_blocks": 5}
    assert stats.connector_gauges == {"kept_blocks": 4}
    assert caplog.text.count("'Bad name'") == caplog.text.count("'broken'") == 1


@pytest.mark.parametrize("block", [(0, 10**6), (0, 60), (0, 0), (0, -1), (7, 3), (-1, 3)])
def test_failed_blocks_that_the_cache_does_not_have_are_logged(block, caplog):
    connector = FakeConnector(layout=make_layout(60))
    sim = Simulation(layout=make_layout(60), connector=connector)
    request = make_request("a", list(range(9)), max_tokens=4)
    sim.add(request)
    connector.transfer.failed = [block]
    sim.run()
    sim.check(request)
    assert f"failed blocks that the cache does not have: [{block}]" in caplog.text


def test_a_connector_may_hold_the_blocks_of_a_finished_request():
    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=FakeConnector(layout=layout, hold=True))
    sim.add(make_request("a", list(range(9)), max_tokens=2))
    while sim.scheduler.lifecycle.requests:
        sim.step()
    assert sim.outputs["a"][-1].kv_transfer == {"remote": "a"}
    assert sim.scheduler.has_transfers()
    assert sim.scheduler._kv.pool.num_free < 19
    sim.run()
    assert not sim.scheduler.has_transfers()


def test_blocks_that_no_rank_reports_as_sent_are_given_back_when_the_connector_says_so():
    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=(connector := FakeConnector(layout=layout, hold=True)))
    connector.transfer.end_step = lambda finished: TransferReport()
    sim.add(make_request("a", list(range(9)), max_tokens=2))
    for _ in range(10):
        sim.step()
    assert not sim.scheduler.lifecycle.requests
    assert sim.scheduler._kv.pool.num_free < 19
    connector.expired = ["a", "never heard of"]
    sim.run()
    assert sim.scheduler._kv.pool.num_free == 19


def test_a_connector_hears_of_every_admission_for_which_it_was_asked():
    layout, prompt = make_layout(20), list(range(9))
    sim = Simulation(layout=layout, connector=(connector := FakeConnector(layout=layout)))
    for name in ("a", "b"):
        sim.add(make_request(name, prompt, max_tokens=2))
        sim.run()
    sim.scheduler.reset_prefix_cache()
    sim.add(make_request("c", prompt, max_tokens=2))
    sim.add(make_request("d", prompt, 2, params=SamplingParams(max_tokens=2, prompt_logprobs=1)))
    sim.run()
    assert connector.told == [("a", 0), ("b", 0), ("c", 8)], "all of b is here; d reads no cache"


def test_a_connector_that_loaded_for_later_is_not_told_again():
    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=(connector := FakeConnector(layout=layout, later=True)))
    for name in ("a", "b"):
        sim.add(make_request(name, list(range(9)), max_tokens=2))
        sim.run()
        sim.scheduler.reset_prefix_cache()
    assert connector.told == [("a", 0), ("b", 8)]


def test_the_content_of_a_view_is_what_blocks_depend_on_besides_tokens():
    def content(size: int = 4, **fields: object) -> bytes:
        layout = make_layout(20, size)
        sim = Simulation(layout=layout, connector=(connector := FakeConnector(layout=layout)))
        sim.add(make_request("a", list(range(9)), max_tokens=2, **fields))
        sim.run()
        return connector.views["a"].content

    row, places = np.ones((1, 8), np.float32), np.array([2], np.int32)
    others = [
        content(salt="s"),
        content(media_keys=["m"]),
        content(params=SamplingParams(max_tokens=2, deterministic=True)),
        content(embeds=PromptEmbeds(rows=row, places=places)),
        content(embeds=PromptEmbeds(rows=row, places=places + 1)),
        content(embeds=PromptEmbeds(rows=row * 2, places=places)),
    ]
    assert content() == content(8) == content(kv_transfer={"x": 1}) == content(seed=5)
    assert len({content(), *others}) == len(others) + 1
    assert content(4, salt="s") == content(8, salt="s")


def test_a_connector_is_told_why_a_request_ended():
    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=(connector := FakeConnector(layout=layout)))
    for name in ("long", "gone"):
        sim.add(make_request(name, list(range(9)), max_tokens=2))
    sim.step()
    assert [view.finish_reason for view in connector.views.values()] == ["", ""]
    sim.scheduler.abort(["gone"])
    sim.run()
    assert {name: view.finish_reason for name, view in connector.views.items()} == {"long": "length", "gone": "abort"}


def test_a_connector_may_add_its_own_numbers_to_a_report():
    class Counting(FakeConnector):
        def update(self, report):
            report.gauges["kept"] = len(report.received) + 3.0
            report.counters["updates"] = 1
            return super().update(report)

    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=Counting(layout=layout))
    sim.add(make_request("a", list(range(9)), max_tokens=2))
    sim.run()
    stats = sim.scheduler.stats()
    assert stats.connector_gauges == {"kept": 3.0}
    assert stats.connector_counters["updates"] >= 2


def test_the_id_of_held_blocks_is_taken():
    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=FakeConnector(layout=layout, hold=True))
    sim.add(make_request("a", list(range(9)), max_tokens=2))
    while sim.scheduler.lifecycle.requests:
        sim.step()
    with pytest.raises(ValueError, match="'a' is there already"):
        sim.add(make_request("a", list(range(9)), max_tokens=2))
    sim.run()
    assert sim.scheduler._kv.pool.num_free == 19


def test_an_aborted_load_frees_its_blocks_when_the_connector_is_done():
    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=FakeConnector(layout=layout, later=True))
    sim.add(make_request("a", list(range(9)), max_tokens=2))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sim.add(make_request("b", list(range(9)), max_tokens=2))
    sim.launch()
    sim.collect(sim.scheduler.abort(["b"]))
    assert sim.reason("b") == "abort"
    assert sim.scheduler._kv.pool.num_free == 17
    sim.run()


def test_a_load_that_a_failed_step_began_keeps_its_blocks_until_it_is_reported():
    layout = make_layout(20)
    sim = Simulation(layout=layout, connector=FakeConnector(layout=layout, later=True))
    sim.add(make_request("a", list(range(9)), max_tokens=2))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sim.add(make_request("b", list(range(9)), max_tokens=2))
    sim.launch(breaks=True)
    sim.answer()
    assert sim.scheduler._kv.pool.num_free == 17
    sim.add(make_request("c", [3] * 9, max_tokens=4))
    sim.run()
    sim.check(make_request("b", list(range(9)), max_tokens=2))
    assert sim.scheduler._kv.pool.num_free == 19


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("others", [0, 3])
def test_a_connector_whose_worker_raises_costs_its_help_and_nothing_else(later, others, monkeypatch):
    layout = make_layout(60)
    sim = Simulation(layout=layout, connector=FakeConnector(layout=layout, later=later))
    sim.add(make_request("a", list(range(13))))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sim.worker.strict = False

    sound = sim.worker.transfer.begin_step

    def broken(message):
        if message:
            raise BrokenStepError("a bug")
        sound(message)

    monkeypatch.setattr(sim.worker.transfer, "begin_step", broken)
    requests = [make_request("b", list(range(13)))]
    requests += [make_request(f"c{number}", [7, 8, number] * 4) for number in range(others)]
    for request in requests:
        sim.add(request)
    sim.run()
    for request in requests:
        sim.check(request)


def test_a_load_that_a_failed_step_never_began_is_given_up_when_its_blocks_are_missed():
    layout = make_layout(5)
    sim = Simulation(layout=layout, connector=FakeConnector(layout=layout, later=True))
    sim.add(make_request("a", list(range(9)), max_tokens=2))
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sim.add(make_request("b", list(range(9)), max_tokens=2))
    sim.launch(refused=True)
    request = make_request("c", [3] * 9, max_tokens=4)
    sim.add(request)
    sim.run()
    sim.check(request)


def test_a_load_takes_the_blocks_that_were_loaded_for_a_later_request_if_nothing_runs():
    layout = make_layout(6)
    connector = FakeConnector(layout=layout, later=True)
    sim = Simulation(layout=layout, connector=connector, policy=PriorityPolicy)
    prompts = [list(range(13)), list(range(20, 33))]
    for number, prompt in enumerate(prompts):
        sim.add(make_request(f"stored{number}", prompt, max_tokens=2))
        sim.run()
    sim.scheduler.reset_prefix_cache()
    later = make_request("later", prompts[0], max_tokens=2, priority=1)
    sim.add(later)
    sim.launch()  # begins its load
    first = make_request("first", prompts[1], max_tokens=2, priority=0)
    sim.add(first)
    sim.run()
    sim.check(first)
    sim.check(later)
    assert sim.outputs["first"][0].num_cached == 12


def test_the_fake_worker_draws_the_tokens_that_the_tests_expect():
    prompt = [1, 2]
    first = next_token(prefixes_of(prompt)[-1], 1, VOCAB)
    assert expected(make_request("a", prompt, max_tokens=1), 64) == ([first], "length")


def test_what_a_step_that_breaks_was_to_compute_is_read_by_nobody_although_its_request_began_again():
    """The blocks that a request keeps in front of one that did not arrive may be those of a step under way."""
    layout = make_layout(60)
    sim = Simulation(layout=layout, connector=FakeConnector(layout=layout), max_in_flight=3)
    sim.add(make_request("a", [1, 2], 1))
    sim.launch()
    sim.add(make_request("b", list(range(15)), 4))
    (begun,) = sim.launch(breaks=True).added
    sim.in_flight[0][1].transfer = TransferReport(failed_blocks=[(0, int(begun.block_ids[0][2]))])
    sim.answer()
    sim.launch()
    sim.run()
    sim.check(make_request("b", list(range(15)), 4))
