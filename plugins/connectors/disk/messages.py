"""The options of the disk connector. Knows no file and no tensor."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from frame.interfaces import KVLayout, Mesh


class DiskOptions(BaseModel):
    """Settings of the disk connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path = Field(description="Where blocks are kept; made when missing. Engines on one folder share blocks.")
    max_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes that the folder may hold; the blocks unused for longest go first; default: no limit.",
    )
    fsync: bool = Field(False, description="Wait until each block has reached the disk.")

    @field_validator("folder")
    @classmethod
    def _make_absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


def loads_later(layout: KVLayout, mesh: Mesh) -> bool:
    """Whether no step computes from what it loads itself.

    One rank may lack what the others load, and what follows from a state that did not come is wrong in all layers: none
    may compute, and save, from that before all is known to be there.
    """
    return mesh.engine_size > 1 or any(group.keeps_states for group in layout.groups)
