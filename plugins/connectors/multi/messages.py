"""The options of the multi connector, and what its two sides tell each other. Knows no connector."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from frame.interfaces import TransferReport


class Child(BaseModel):
    """One of the connectors; vLLM's names of its fields and roles are taken, too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_connector: str
    kv_role: Literal["both", "producer", "consumer"] | None = None
    options: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("options", "kv_connector_extra_config")
    )

    @field_validator("kv_role", mode="before")
    @classmethod
    def _plain_role(cls, role: Any) -> Any:
        return role.removeprefix("kv_") if isinstance(role, str) else role


class MultiOptions(BaseModel):
    """Settings of the multi connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connectors: list[Child] = Field(
        min_length=1,
        max_length=16,
        description="The connectors, in the order in which they are asked: a list of mappings with kv_connector, and "
        "maybe kv_role and options, which go over those of plugin.NAME.",
    )


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Load `number`, of `owner`, which ends with this step; `failed` are its blocks (group, id) that do not come."""

    number: int
    owner: str
    failed: list[tuple[int, int]] = []


class MultiStep(msgspec.Struct):
    """The message of each connector, in order, and the loads of which no worker side will tell that they ended.

    Those are named again until the scheduler side has read that they ended.
    """

    messages: list[bytes]
    ended: list[Ended] = []


class ChildNote(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's worker side of connector number `place` reported in a step."""

    place: int
    report: TransferReport
