"""Latency from the engine to its workers: shared-memory broadcast beside one socket for each worker.

    python benchmarks/broadcast.py [--readers 2 8] [--messages 2000] [--gap-us 0 1000] [--masks-kib 0 1200]

A message is the plan of a decode step of 64 rows, with as many KiB of grammar masks. Readers are processes. Each stamps
the time (CLOCK_MONOTONIC, which all processes of a host share) at which it has decoded a message, and the last of them
counts: microseconds from before the writer encodes, p50 and p99. `--gap-us` lies between the moment at which all have
read a message and the next one; readers sleep in long gaps. `write` is how long the writer was busy, p50.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.step import StepPlan
from frame.core.interfaces.wire import Borrowed
from frame.core.processes.broadcast import BroadcastReader, BroadcastWriter, RingShape
from frame.core.processes.channel import Channel

ROWS = 64


class Step(msgspec.Struct, tag=True):
    """Writer to readers: what a step needs."""

    plan: StepPlan
    masks: Borrowed


class Attach(msgspec.Struct, tag=True):
    """Writer to a reader: two open files follow."""

    shape: RingShape
    reader: int
    spin_seconds: float


class Stamp(msgspec.Struct, tag=True):
    """Reader to writer: when a message was decoded, in nanoseconds."""

    read_ns: int


Message = Step | Attach | Stamp


def _plan(step: int) -> StepPlan:
    rows = np.arange(ROWS, dtype=np.int32)
    return StepPlan(
        step=step,
        removed_slots=rows[:0],
        added=[],
        appends=[],
        slots=rows,
        num_scheduled=np.ones(ROWS, np.int32),
        num_computed=rows + 1000,
        samples=np.ones(ROWS, np.bool_),
        num_drafts=np.zeros(ROWS, np.int32),
    )


def _serve(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor), Message)

    def answer(message: Any) -> None:
        channel.send(Stamp(time.monotonic_ns()))

    while (message := channel.receive()) is not None:
        if isinstance(message, Attach):
            files = channel.receive_descriptors(2)
            reader = BroadcastReader(message.shape, message.reader, files, channel, Message, message.spin_seconds)
            while reader.read(answer):
                pass
            reader.close()
            return
        answer(message)


def _measure(channels: list[Channel], send: Any, count: int, gap_seconds: float, masks: bytes) -> str:
    latencies, writes = [], []
    for step in range(count + 50):
        begin = time.monotonic_ns()
        send(Step(_plan(step), Borrowed(masks)))
        writes.append((time.monotonic_ns() - begin) / 1e3)
        latencies.append((max(channel.receive().read_ns for channel in channels) - begin) / 1e3)
        if gap_seconds:
            time.sleep(gap_seconds)
    p50, p99 = np.percentile(latencies[50:], [50, 99])
    return f"p50 {p50:7.1f}  p99 {p99:7.1f}  write {np.percentile(writes[50:], 50):7.1f}"


def _run(kind: str, num_readers: int, options: argparse.Namespace, gap_us: int, masks_kib: int) -> str:
    processes, channels = [], []
    for _ in range(num_readers):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, "--serve", str(theirs.fileno())]
            processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        channels.append(Channel(ours, Message))
    writer = BroadcastWriter(RingShape(num_readers))

    def send(message: Step) -> None:
        if kind == "ring":
            writer.write(message, channels)
        else:
            for channel in channels:
                channel.send(message)

    if kind == "ring":
        for index, channel in enumerate(channels):
            channel.send(Attach(writer.shape, index, options.spin_us / 1e6))
            channel.send_descriptors(writer.descriptors(index))
    try:
        return _measure(channels, send, options.messages, gap_us / 1e6, bytes(masks_kib << 10))
    finally:
        for channel, process in zip(channels, processes, strict=True):
            channel.close()
            process.wait()
        writer.close()


def main() -> None:
    """Prints a line for each kind, number of readers, gap and size of masks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--gap-us", type=int, nargs="+", default=[0, 1000])
    parser.add_argument("--masks-kib", type=int, nargs="+", default=[0, 1200])
    parser.add_argument("--spin-us", type=float, default=50, help="how long a reader looks before it sleeps")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options.serve)
        return
    print(f"{os.cpu_count()} cores, {options.messages} messages of {ROWS} rows; microseconds")
    for num_readers in options.readers:
        for gap_us in options.gap_us:
            for masks_kib in options.masks_kib:
                for kind in ("socket", "ring"):
                    figures = _run(kind, num_readers, options, gap_us, masks_kib)
                    print(
                        f"{num_readers} readers, gap {gap_us:5}, masks {masks_kib:5} KiB, {kind:6}: {figures}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
