"""The default subcommands of `frame`."""

from __future__ import annotations

from frame import Provider, hookimpl

_HERE = "frame.plugins.commands"
#: Name, class, and the line in `frame --help`.
_COMMANDS = (
    ("chat", f"{_HERE}.chat:ChatCommand", "Chat with a running server."),
    ("complete", f"{_HERE}.complete:CompleteCommand", "Have a running server continue a text."),
    (
        "run-batch",
        "frame.plugins.batches.command:RunBatchCommand",
        "Answer a file of requests: frame run-batch -i IN.jsonl -o OUT.jsonl [MODEL].",
    ),
    (
        "models",
        f"{_HERE}.models:ModelsCommand",
        "List architectures, look into a checkpoint, or ask a server: frame models [FOLDER].",
    ),
    (
        "plugins",
        f"{_HERE}.plugins:PluginsCommand",
        "List installed plugins, or check one: frame plugins check NAME.",
    ),
    ("collect-env", f"{_HERE}.collect_env:CollectEnvCommand", "Print versions and hardware for a bug report."),
    (
        "completion",
        f"{_HERE}.completion:CompletionCommand",
        "Print a completion script: frame completion bash|zsh|fish.",
    ),
    (
        "route",
        f"{_HERE}.route:RouteCommand",
        "One address in front of several servers: frame route URL URL.",
    ),
    (
        "bench",
        f"{_HERE}.bench.command:BenchCommand",
        "Measure a server or an engine: serve, latency, throughput, startup, kernels, sweep.",
    ),
    (
        "doctor",
        f"{_HERE}.doctor.command:DoctorCommand",
        "Predict memory, capacity and load time of a checkpoint, and the limit that is met first.",
    ),
    (
        "eplb",
        f"{_HERE}.eplb.command:EplbCommand",
        "Replay recorded expert loads over balancers and numbers of ranks: frame eplb simulate TRACE.",
    ),
)


@hookimpl
def frame_commands() -> list[Provider]:
    """Clients of a server, facts about models and machines, benchmarks and predictions."""
    return [Provider(name, target, api=">=0.2.dev1,<0.3", summary=summary) for name, target, summary in _COMMANDS]
