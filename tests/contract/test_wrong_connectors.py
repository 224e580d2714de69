"""The suite of connectors finds what is wrong with several ranks, between engines and where something ends."""

from __future__ import annotations

import pytest

from frame.testing.contract_run import run_suite

WRONG, KEEPING = "tests.contract.wrong_connectors", "tests.contract.keeping"
STATES = "tests.contract.keeping_states"
KEEPER = f"{KEEPING}:Keeper"
OPTIONS = f"{KEEPING}:Options"
DISK = "frame.plugins.connectors.disk.messages:DiskOptions"

RANKS = "two ranks give the tokens of one"
LACKING = "what one rank lacks is computed on all"
LATE = "a completion that comes late leaks nothing"
NEVER = "a completion that never comes leaks nothing"
RESET = "reset while a load is under way waits or refuses"
SLEEP = "sleep while blocks are held waits or refuses"
CONSUMER = "a consumer that dies"
PRODUCER = "a producer that dies"
OTHERS = "engines of other block size or ranks take right blocks or none"
PREFIX = "a state is stored with the prefix that it stands for"
DAMAGED = "a state or block that is damaged is computed again"
LIVES = "random lives with states"
RELOAD = "a reloaded prompt gives the tokens of a cold one"
REAL = "a real model on two ranks gives the same tokens"


def run(target, worker, check, options=OPTIONS):
    """Outcomes of one check; no right connector here needs time."""
    return run_suite(
        "connector", only=check, target=target, tags={"worker": worker}, options_model=options, patience_seconds=0.2
    )


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("target", "worker", "check", "options"),
    [
        (f"{WRONG}:Rankless", f"{WRONG}:RanklessKeeper", RANKS, OPTIONS),
        (f"{WRONG}:Rankless", f"{WRONG}:RanklessKeeper", REAL, OPTIONS),
        (f"{WRONG}:Hasty", "frame.plugins.connectors.disk.worker:DiskWorker", LACKING, DISK),
        (f"{KEEPING}:KeepingSender", f"{WRONG}:Twice", LATE, OPTIONS),
        (f"{KEEPING}:Late", f"{WRONG}:Dropping", LATE, OPTIONS),
        (f"{KEEPING}:KeepingSender", f"{WRONG}:Patient", NEVER, OPTIONS),
        (f"{WRONG}:Forgetting", f"{WRONG}:ForgettingKeeper", RESET, OPTIONS),
        (f"{KEEPING}:Keeping", f"{WRONG}:Clinging", SLEEP, OPTIONS),
        (f"{KEEPING}:Keeping", f"{WRONG}:Lingering", SLEEP, OPTIONS),
        (f"{WRONG}:LateLender", f"{WRONG}:Reserving", CONSUMER, OPTIONS),
        (f"{KEEPING}:Late", f"{WRONG}:Believing", PRODUCER, OPTIONS),
        (f"{WRONG}:Shapeless", f"{WRONG}:ShapelessKeeper", OTHERS, OPTIONS),
        (f"{WRONG}:Tokenwise", f"{WRONG}:ShapelessKeeper", OTHERS, OPTIONS),
        (f"{STATES}:Stateless", f"{STATES}:StateKeeper", RELOAD, OPTIONS),
        (f"{STATES}:Older", f"{STATES}:StateKeeper", PREFIX, OPTIONS),
        (f"{STATES}:KeepingLive", f"{STATES}:TardyKeeper", PREFIX, OPTIONS),
        ("frame.plugins.connectors.disk.scheduler:DiskScheduler", f"{STATES}:BelievingDisk", DAMAGED, DISK),
    ],
)
def test_a_wrong_connector_fails_the_check_meant_for_it(target, worker, check, options):
    outcomes = run(target, worker, check, options)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    assert check in {outcome.name for outcome in failed}, outcomes
    # by what it did, not because it cannot be called
    assert not any("TypeError" in outcome.reason for outcome in failed), failed


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("target", "worker", "check"),
    [
        (f"{KEEPING}:KeepingSender", f"{WRONG}:LendingKeeper", NEVER),
        (f"{WRONG}:LateLender", f"{WRONG}:LendingKeeper", CONSUMER),
        (f"{KEEPING}:Late", f"{WRONG}:DueKeeper", PRODUCER),
        (f"{STATES}:KeepingStates", f"{STATES}:StateKeeper", PREFIX),
        (f"{STATES}:KeepingStates", f"{STATES}:StateKeeper", LIVES),
    ],
)
def test_their_right_twins_pass(target, worker, check):
    assert {outcome.status for outcome in run(target, worker, check)} == {"passed"}
