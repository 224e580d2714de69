"""Latency from the engine to its workers: shared-memory broadcast beside one socket for each worker.

    python benchmarks/broadcast.py [--readers 2 8] [--rows 1 64 512] [--gap-us 0 1000 10000] [--masks-kib 0 1200]

A message is the plan of a decode step, with as many KiB of grammar masks. Readers are processes. Each stamps the time
(CLOCK_MONOTONIC, which all processes of a host share) at which it has made a plan of a message, and the last of them
counts: p50/p99 of microseconds from before the engine makes the message. Of the ring they are divided: "encode" is over
when the message is encoded, "transport" when that reader begins to decode it, "decode" when it has the plan. `--gap-us`
lies between the moment at which all have read a message and the next one. "busy" is the part of a processor that a
reader took meanwhile; it gives that to whoever wants it.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.step import BlockAppend, StepPlan
from frame.core.interfaces.wire import Borrowed
from frame.core.processes.broadcast import BroadcastReader, BroadcastWriter, RingShape
from frame.core.processes.channel import Channel
from frame.links.step_messages import Execute

#: Messages that are not counted.
WARM_UP = 50


class Masked(msgspec.Struct, tag=True):
    """Writer to readers: a plan and its masks, which the engine sends one after the other."""

    step: Execute
    masks: Borrowed


class Attach(msgspec.Struct, tag=True):
    """Writer to a reader: two open files follow."""

    shape: RingShape
    reader: int
    options: dict[str, float]


class Stamp(msgspec.Struct, tag=True):
    """Reader to writer, in nanoseconds: when it began to decode a message, had its plan, and its processor time."""

    begun: int
    read: int
    busy: int


Message = Execute | Masked | Attach | Stamp


class Timed:
    """A function that notes when it was called last and when it returned."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self.begun = self.ended = 0

    def __call__(self, argument: Any) -> Any:
        self.begun = time.monotonic_ns()
        result = self._work(argument)
        self.ended = time.monotonic_ns()
        return result


def _plan(step: int, num_rows: int, num_appends: int) -> StepPlan:
    rows = np.arange(num_rows, dtype=np.int32)
    some = rows[:num_appends]
    return StepPlan(
        step=step,
        removed_slots=rows[:0],
        added=[],
        appends=[BlockAppend(group=0, slots=some, offsets=some, block_ids=some)] if num_appends else [],
        slots=rows,
        num_scheduled=np.ones(num_rows, np.int32),
        num_computed=rows + 1000,
        samples=np.ones(num_rows, np.bool_),
        num_drafts=np.zeros(num_rows, np.int32),
    )


def _serve(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor), Message)
    decoding = Timed(lambda data: None)

    def answer(message: Any) -> None:
        (message.step if isinstance(message, Masked) else message).plan()
        channel.send(Stamp(decoding.begun, time.monotonic_ns(), time.process_time_ns()))

    while (message := channel.receive()) is not None:
        if isinstance(message, Attach):
            files = channel.receive_descriptors(2)
            reader = BroadcastReader(message.shape, message.reader, files, channel, Message, **message.options)
            reader._decode = decoding = Timed(reader._decode)
            while reader.read(answer):
                pass
            reader.close()
            return
        answer(message)


def _pair(values: list[float]) -> str:
    p50, p99 = np.percentile(values[WARM_UP:], [50, 99]) / 1e3
    return f"{p50:7.1f} /{p99:7.1f}"


def _measure(
    channels: list[Channel], writer: BroadcastWriter | None, plans: list[StepPlan], gap: float, masks: bytes
) -> str:
    parts: list[list[float]] = [[], [], [], []]
    encoding = Timed(lambda message: b"")
    if writer is not None:
        writer._encode = encoding = Timed(writer._encode)
    began = []
    for plan in plans:
        begin = time.monotonic_ns()
        message = Masked(Execute.of(plan), Borrowed(masks)) if masks else Execute.of(plan)
        if writer is not None:
            writer.write(message, channels)
        else:
            for channel in channels:
                channel.send(message)
        stamps = [channel.receive() for channel in channels]
        last = max(stamps, key=lambda stamp: stamp.read)
        times = [begin, encoding.ended, last.begun, last.read]
        for values, value in zip(parts, (last.read - begin, *np.diff(times)), strict=True):
            values.append(value)
        began.append((begin, max(stamp.busy for stamp in stamps)))
        if gap:
            time.sleep(gap)
    (first, busy), (end, busier) = began[WARM_UP], began[-1]
    names = ("total", "encode", "transport", "decode")[: 1 if writer is None else 4]
    shown = "  ".join(f"{name} {_pair(values)}" for name, values in zip(names, parts, strict=False))
    return f"busy {(busier - busy) / (end - first):4.0%}  {shown}"


def _run(kind: str, num_readers: int, options: argparse.Namespace, case: tuple[int, int, int]) -> str:
    num_rows, gap_us, masks_kib = case
    processes, channels = [], []
    for _ in range(num_readers):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, "--serve", str(theirs.fileno())]
            processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        channels.append(Channel(ours, Message))
    writer = BroadcastWriter(RingShape(num_readers)) if kind == "ring" else None
    if writer is not None:
        spin = {} if options.spin_us is None else {"spin_seconds": options.spin_us / 1e6}
        for index, channel in enumerate(channels):
            channel.send(Attach(writer.shape, index, spin))
            channel.send_descriptors(writer.descriptors(index))
    plans = [_plan(step, num_rows, options.appends) for step in range(options.messages + WARM_UP)]
    try:
        return _measure(channels, writer, plans, gap_us / 1e6, bytes(masks_kib << 10))
    finally:
        for channel, process in zip(channels, processes, strict=True):
            channel.close()
            process.wait()
        if writer is not None:
            writer.close()


def main() -> None:
    """Prints a line for each number of readers, rows, gap, size of masks and kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--readers", type=int, nargs="+", default=[2])
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--appends", type=int, default=0, help="rows that gain a block in each step")
    parser.add_argument("--gap-us", type=int, nargs="+", default=[0, 1000, 10000])
    parser.add_argument("--masks-kib", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", choices=["ring", "socket"], default=["ring", "socket"])
    parser.add_argument("--spin-us", type=float, help="how long a reader looks before it sleeps, at most")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options.serve)
        return
    print(f"{os.cpu_count()} cores, {options.messages} messages; microseconds, p50 / p99")
    cases = [(rows, gap, masks) for gap in options.gap_us for masks in options.masks_kib for rows in options.rows]
    for num_readers in options.readers:
        for case in cases:
            for kind in options.kinds:
                shown = f"{num_readers} readers, {case[0]:4} rows, gap {case[1]:5}, masks {case[2]:4} KiB, {kind:6}:"
                print(shown, _run(kind, num_readers, options, case), flush=True)


if __name__ == "__main__":
    main()
