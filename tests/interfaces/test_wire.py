"""Messages that several threads read, and those that strangers send."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from frame.core.interfaces import wire

#: Threads that read messages of a kind that none of them has read before.
SCRIPT = """
import sys
import threading
import msgspec
from frame.core.interfaces import wire

sys.setswitchinterval(1e-6)
for number in range(40):
    inner = msgspec.defstruct(f"Inner{number}", [(f"f{i}", int, 0) for i in range(12)])
    outer = msgspec.defstruct(f"Outer{number}", [(f"g{i}", list[inner], []) for i in range(8)], tag=True)
    other = msgspec.defstruct(f"Other{number}", [("a", outer)], tag=True)
    data = wire.encode(other(outer([inner(1, 2)] * 3)))
    gate = threading.Barrier(4)

    def read():
        gate.wait()
        wire.decode(data, outer | other)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_read_a_kind_for_the_first_time_at_once_do_not_end_the_process() -> None:
    """msgspec's own decoders did that: two API processes that connected at once ended the engine by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


class Said(msgspec.Struct):
    """A message with nothing in it that nests."""

    text: str = ""


@pytest.mark.parametrize("depth", [20_000, 100_000])
def test_what_nests_too_deeply_is_refused_like_anything_else_that_is_wrong(depth: int) -> None:
    """Also in a field that is passed over: callers await a `ValidationError`, and nothing else ends their threads."""
    data = b"\x81\xa5other" + b"\x91" * depth + b"\xc0"
    with pytest.raises(msgspec.ValidationError, match="nested too deeply"):
        wire.decode(data, Said)
