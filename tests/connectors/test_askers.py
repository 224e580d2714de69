"""Places that say nothing take some threads, and the questions to others go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from frame.plugins.connectors.blocks.askers import PER_HOST, STRANGERS, STRANGERS_PER_HOST, THREADS, Askers

SECONDS = 60.0


class Silent:
    """Askers, and questions to places that say nothing until `hang_up`."""

    def __init__(self) -> None:
        self.askers = Askers("test")
        self.over = threading.Event()
        self.begun = threading.Semaphore(0)
        self._begun = list[int]()  # ports; appending is one step, adding is not

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def ask(self, host: str, port: int) -> Future[str]:
        def wait() -> str:
            self._begun.append(port)
            self.begun.release()
            assert self.over.wait(SECONDS)
            return f"{host}:{port}"

        return self.askers.submit((host, port), wait)

    def await_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=SECONDS)

    def answers(self, host: str, port: int) -> bool:
        """Whether another place is asked meanwhile."""
        return self.askers.submit((host, port), lambda: True).result(SECONDS)


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.over.set()
    made.askers.close()


def test_silent_ports_of_a_host_leave_threads_to_other_hosts(silent: Silent) -> None:
    asked = [silent.ask("bad", port) for port in range(4 * THREADS)]
    silent.await_begun(STRANGERS_PER_HOST)
    assert all(silent.answers("good", 1) for _ in range(20))
    assert silent.num_begun == STRANGERS_PER_HOST
    silent.over.set()
    assert [one.result(SECONDS) for one in asked] == [f"bad:{port}" for port in range(4 * THREADS)]


def test_silent_hosts_leave_threads_to_places_that_have_answered(silent: Silent) -> None:
    silent.askers.heard(("good", 1), True)
    asked = [silent.ask(f"bad {host}", port) for host in range(THREADS) for port in range(3)]
    silent.await_begun(STRANGERS)
    assert all(silent.answers("good", 1) for _ in range(20))
    assert silent.num_begun == STRANGERS
    silent.over.set()
    assert len({one.result(SECONDS) for one in asked}) == 3 * THREADS


def test_a_place_that_has_answered_is_asked_beside_silent_ports_of_its_host(silent: Silent) -> None:
    silent.askers.heard(("host", 1), True)
    for port in range(2, 40):
        silent.ask("host", port)
    silent.await_begun(STRANGERS_PER_HOST)
    assert silent.answers("host", 1)


def test_one_that_falls_silent_leaves_threads_to_others(silent: Silent) -> None:
    for host in ("was good", "good"):
        silent.askers.heard((host, 1), True)
    for _ in range(40):
        silent.ask("was good", 1)
    silent.await_begun(PER_HOST)
    assert silent.answers("good", 1)
    assert silent.num_begun == PER_HOST
    silent.askers.heard(("was good", 1), False)
    assert ("was good", 1) not in silent.askers._known


def test_what_waits_can_be_cancelled_and_errors_arrive(silent: Silent) -> None:
    asked = [silent.ask("bad", port) for port in range(STRANGERS_PER_HOST + 2)]
    silent.await_begun(STRANGERS_PER_HOST)
    assert [one.cancel() for one in asked] == [False] * STRANGERS_PER_HOST + [True] * 2

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        silent.askers.submit(("good", 1), fail).result(SECONDS)
    last = silent.ask("bad", 0)
    silent.over.set()
    assert last.result(SECONDS) == "bad:0"


def test_closing_waits_for_what_has_begun_alone() -> None:
    made = Silent()
    asked = [made.ask("bad", port) for port in range(20)]
    made.await_begun(STRANGERS_PER_HOST)
    threading.Timer(0.05, made.over.set).start()
    made.askers.close()
    assert all(one.done() for one in asked[:STRANGERS_PER_HOST])
    assert made.num_begun == STRANGERS_PER_HOST


def test_closing_ends_also_what_waits_for_a_thread() -> None:
    """Else whoever waits for its result does so for ever."""
    made, closed = Silent(), threading.Event()
    asked = [made.ask("bad", port) for port in range(STRANGERS_PER_HOST + 1)]
    made.await_begun(STRANGERS_PER_HOST)
    asked[-1].add_done_callback(lambda _: closed.set())
    hosts = [f"good {number}" for number in range(THREADS - STRANGERS_PER_HOST)]
    for host in hosts:
        made.askers.heard((host, 1), True)
        asked.append(made.ask(host, 1))
    made.await_begun(len(hosts))
    asked += [made.ask("late", port) for port in range(4)]
    closing = threading.Thread(target=made.askers.close)
    closing.start()
    assert closed.wait(SECONDS)
    made.over.set()
    closing.join(SECONDS)
    assert all(one.done() for one in asked)
    assert made.num_begun == THREADS
