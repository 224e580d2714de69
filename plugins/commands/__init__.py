"""The default subcommands of `frame`."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.1,<0.2"


@hookimpl
def frame_commands() -> list[Provider]:
    """Benchmarks and predictions."""
    return [
        Provider(
            "bench",
            "frame.plugins.commands.bench.command:BenchCommand",
            summary="Measure a server or an engine: serve, latency, throughput, startup, kernels, sweep.",
            api=_API,
        ),
        Provider(
            "doctor",
            "frame.plugins.commands.doctor.command:DoctorCommand",
            summary="Predict memory, capacity and load time of a checkpoint, and name what binds.",
            api=_API,
        ),
    ]
