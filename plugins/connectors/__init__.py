"""The KV connectors that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_kv_connectors() -> list[Provider]:
    """Blocks of prompts on a local or shared disk."""
    here = "frame.plugins.connectors"
    return [
        Provider(
            "disk",
            f"{here}.disk:DiskScheduler",
            api=">=0.1,<0.2",
            summary="prompt blocks in a folder that engines share and that outlives them",
            options=f"{here}.disk_messages:DiskOptions",
            tags={"worker": f"{here}.disk_worker:DiskWorker"},
        )
    ]
