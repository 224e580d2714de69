"""Options of the resolver `folder`. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class FolderOptions(BaseModel):
    """Settings of the resolver `folder`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Path = Field(description="Folder whose subfolders are adapters, each named as requests name it.")
