"""Options of the adapter plugin `lora`. Imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LoraOptions(BaseModel):
    """Settings of the adapter plugin `lora`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experts: bool = Field(
        True,
        description="Whether routed experts take adapters; each slot has memory for all of them. Without it adapters "
        "of experts are refused, and steps with adapters compute experts as other steps do.",
    )
    shared_products: bool | None = Field(
        None,
        description="Whether the first matrices of adapters lie behind a layer's own weight, so that one product "
        "multiplies by both, where they are few rows beside it: of layers in the model's type, unless weights are kept "
        "in host memory, and but for deterministic steps. By default on CUDA devices.",
    )
