"""What an engine process logs while it is a standby, and from when on."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from frame.core.processes.channel import Channel
from frame.core.processes.messages import Begin, EngineReport, Failed, Prepared

CHILD = """
import logging, sys
from frame.core.config.flat import from_flat
from frame.core.startup.logging import configure_logging
from frame.core.processes.engine_process import EngineProcess

logger = logging.getLogger("frame.worker")

def prepare(config, stage):
    for level in ("debug", "info", "warning"):
        getattr(logger, level)("standing by: %s", level)
    print("ready", flush=True)

    def build():
        logger.info("building")
        raise ValueError("enough seen")

    return build

configure_logging(sys.argv[2])
EngineProcess(from_flat({"model": "", "log_level": sys.argv[2]}), "@never", int(sys.argv[1]), prepare).run()
"""


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("info", ["building"]),
        ("debug", ["debug", "info", "warning", "building"]),
        ("error", []),
    ],
)
def test_one_that_stands_by_tells_nothing_of_its_preparations(level: str, heard: list[str]) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", CHILD, str(theirs.fileno()), level]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], text=True, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        channel = Channel(ours, EngineReport)
        channel.send(Begin())
        assert [channel.receive(), channel.receive()] == [Prepared(), Failed("enough seen", refused=True)]
        lines = child.communicate(timeout=60)[1].splitlines()
    channel.close()
    told = [line.split()[-1] for line in lines if "standing by" in line or "building" in line]
    assert told == heard
