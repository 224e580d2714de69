"""Platforms: the devices that frame runs on."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_platforms() -> list[Provider]:
    """The platforms that ship with frame."""
    return [
        Provider(
            "cuda",
            "frame.plugins.platforms.cuda.platform:CudaPlatform",
            api=">=0.2.dev1,<0.3",
            summary="one NVIDIA GPU, compute capability 8.0 or later",
            preference=10,
            options="frame.plugins.platforms.options:CudaOptions",
            tags={"early": "frame.plugins.platforms.cuda.compile.early:begin"},
        ),
        Provider(
            "cpu",
            "frame.plugins.platforms.cpu:CpuPlatform",
            api=">=0.2.dev1,<0.3",
            summary="any processor that torch runs on",
            options="frame.plugins.platforms.options:CpuOptions",
        ),
    ]
