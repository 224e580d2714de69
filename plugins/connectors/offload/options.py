"""The options of the offload connector."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: Bytes of the buffer for copies of each direction, and about those of a worker's checksums.
_BUFFER_BYTES = _SUM_BYTES = 32 << 20
_MOST_ROWS = 256


class OffloadOptions(BaseModel):
    """Settings of the offload connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: float = Field(
        4.0,
        gt=0,
        le=1 << 20,
        description="GiB of host memory for blocks, of all workers of an engine together; set by kv_offloading_size.",
    )
    policy: str = Field("lru", description="Tier policy plugin, which says which blocks go when others need room.")
    block_size: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Tokens of a block of the tier, a multiple of the cache's; 0: as many as there.",
    )
    shared: bool = Field(
        False,
        description="Keep the blocks in shared memory, where engines of this machine find each other's, and an engine "
        "those of one that was killed.",
    )
    shared_folder: Path = Field(
        Path("/dev/shm"),  # noqa: S108
        description="The folder of shared memory, in which a folder of this user is made.",
    )
    keep: bool = Field(False, description="Leave what is in shared memory there for the next engine after a clean end.")
    disk_folder: str = Field(
        "",
        description="Where blocks go that host memory has no room for; made when missing; empty: nowhere.",
    )
    disk_size: float = Field(
        64.0,
        gt=0,
        le=1 << 30,
        description="GiB that the folder may hold; the blocks unused for longest go first.",
    )
    disk_threads: int = Field(4, ge=1, le=64, description="Threads of each worker that fetch blocks; one more writes.")

    @field_validator("shared_folder")
    @classmethod
    def _make_absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()

    @model_validator(mode="after")
    def _check_needs(self) -> OffloadOptions:
        if self.keep and not self.shared:
            raise ValueError("keep has no effect without shared: only what is in shared memory can be left there")
        if "disk_size" in self.model_fields_set and not self.disk_folder:
            raise ValueError("disk_size has no effect without disk_folder")
        return self

    @property
    def disk(self) -> Path | None:
        """The folder of the disk, if there is one."""
        return Path(self.disk_folder).expanduser().absolute() if self.disk_folder else None

    @property
    def disk_bytes(self) -> int:
        """The size of what is on the disk, in bytes."""
        return int(self.disk_size * (1 << 30))

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return int(self.size * (1 << 30))


def buffer_rows(row_bytes: int) -> int:
    """Rows in the buffer of each direction: at least one, however large."""
    return max(1, min(_MOST_ROWS, _BUFFER_BYTES // row_bytes))


def device_bytes(options: OffloadOptions, role: str, device_type: str) -> int:
    """Bytes of a worker's device for the buffers, and for checksums where the rows lie in shared memory.

    The buffer for a state, whose size only the model says, is not counted.
    """
    if device_type == "cpu":  # the copies need no room of the device
        return 0
    return 2 * _BUFFER_BYTES + (_SUM_BYTES if options.shared else 0)
