"""The options of the ray executor, in a module that needs neither torch nor Ray."""

from __future__ import annotations

from pydantic import Field

from .process_options import ProcessOptions


class RayOptions(ProcessOptions):
    """Settings of the ray executor."""

    address: str = Field("auto", description="Ray cluster to use; auto: RAY_ADDRESS, or the one that runs here.")
    cpus: float = Field(1.0, ge=0, description="CPUs that each worker reserves.")
    gpus: float | None = Field(
        None, ge=0, description="GPUs that each worker reserves; default: 1 where the cluster has any, else 0."
    )
    wait_seconds: float = Field(600.0, gt=0, description="Seconds in which the cluster must give what was asked for.")
