"""The default subcommands of `frame`."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_commands() -> list[Provider]:
    """What people type: clients of a server, facts about models and machines, benchmarks and predictions."""
    return [
        Provider(
            "chat",
            "frame.plugins.commands.chat:ChatCommand",
            summary="Chat with a running server.",
            api=_API,
        ),
        Provider(
            "complete",
            "frame.plugins.commands.complete:CompleteCommand",
            summary="Have a running server continue a text.",
            api=_API,
        ),
        Provider(
            "run-batch",
            "frame.plugins.batches.command:RunBatchCommand",
            summary="Answer a file of requests: frame run-batch -i IN.jsonl -o OUT.jsonl [MODEL].",
            api=_API,
        ),
        Provider(
            "models",
            "frame.plugins.commands.models:ModelsCommand",
            summary="List architectures, look into a checkpoint, or ask a server: frame models [FOLDER].",
            api=_API,
        ),
        Provider(
            "collect-env",
            "frame.plugins.commands.collect_env:CollectEnvCommand",
            summary="Print versions and hardware, for a report of a defect.",
            api=_API,
        ),
        Provider(
            "completion",
            "frame.plugins.commands.completion:CompletionCommand",
            summary="Print a completion script: frame completion bash|zsh|fish.",
            api=_API,
        ),
        Provider(
            "bench",
            "frame.plugins.commands.bench.command:BenchCommand",
            summary="Measure a server or an engine: serve, latency, throughput, startup, kernels, sweep.",
            api=_API,
        ),
        Provider(
            "doctor",
            "frame.plugins.commands.doctor.command:DoctorCommand",
            summary="Predict memory, capacity and load time of a checkpoint, and the limit that is met first.",
            api=_API,
        ),
    ]
