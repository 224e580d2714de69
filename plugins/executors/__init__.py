"""Executors: where workers run."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_executors() -> list[Provider]:
    """The executors that ship with frame."""
    return [
        Provider(
            "inline",
            "frame.plugins.executors.inline:InlineExecutor",
            api=">=0.2.dev1,<0.3",
            summary="one worker in the engine's own process",
            preference=10,
        ),
        Provider(
            "process",
            "frame.plugins.executors.process:ProcessExecutor",
            api=">=0.2.dev1,<0.3",
            summary="workers in processes of their own, on one machine",
            tags={"spawns": "early"},
            options="frame.plugins.executors.process_options:ProcessOptions",
            preference=5,
        ),
        Provider(
            "nodes",
            "frame.plugins.executors.nodes:NodesExecutor",
            api=">=0.2.dev1,<0.3",
            summary="workers in processes of their own, on several machines that are started one by one",
            options="frame.plugins.executors.nodes_options:NodesOptions",
            preference=3,
        ),
        Provider(
            "ray",
            "frame.plugins.executors.ray:RayExecutor",
            api=">=0.2.dev1,<0.3",
            summary="workers in processes of their own, where a Ray cluster places them",
            options="frame.plugins.executors.ray_options:RayOptions",
            preference=0,
        ),
        Provider(
            "external",
            "frame.plugins.executors.external:ExternalExecutor",
            api=">=0.2.dev1,<0.3",
            summary="one worker in each of several processes that torchrun started, which all run the same engine",
            preference=1,
        ),
    ]
