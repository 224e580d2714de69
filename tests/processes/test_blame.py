from __future__ import annotations

from frame.core.processes.supervisor import Blame

CAUSE = "the engine process ended with status 7"


def test_a_crash_is_narrowed_down_to_one_request() -> None:
    blame = Blame()
    assert blame.death(["a", "b", "p", "d"], CAUSE, cleared=True, killed=False) is None
    assert blame.begin.suspects == [["a", "b"], ["p", "d"]]
    assert blame.death(["p", "d"], CAUSE, cleared=False, killed=False) is None
    assert blame.death(["p"], CAUSE, cleared=False, killed=False) == "p"
    assert blame.begin.suspects == [["d"]]
    assert list(blame.begin.guilty) == ["p"]


def test_being_alone_in_one_crash_proves_nothing() -> None:
    blame = Blame()
    assert blame.death(["p"], CAUSE, cleared=True, killed=False) is None
    assert blame.begin.suspects == [["p"]]
    assert blame.death(["p"], CAUSE, cleared=False, killed=False) == "p"


def test_whoever_gets_on_between_kills_is_never_guilty() -> None:
    blame = Blame()
    for _ in range(10):
        assert blame.death(["a"], CAUSE, cleared=True, killed=True) is None
        assert blame.death(["a"], CAUSE, cleared=False, killed=True) is None
    assert blame.death(["a"], CAUSE, cleared=False, killed=True) == "a"


def test_a_death_without_a_step_blames_nobody() -> None:
    blame = Blame()
    assert blame.death([], CAUSE, cleared=True, killed=False) is None
    assert blame.begin.suspects == []
