"""The options of the platforms, in a module that needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

#: Which products our own kernels for Hopper do.
HopperProducts = Literal["deterministic", "measured", "all"]


class CudaOptions(BaseModel):
    """Settings of the CUDA platform."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    graph_sizes: list[int] = Field(
        default_factory=lambda: [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 16), *range(256, 513, 32)],
        description="Decode batch sizes that are captured; a batch is padded to the next of them.",
    )
    graph_sizes_at_start: int = Field(
        32,
        ge=0,
        description="The largest of these sizes and those up to this one are captured before the first request, the "
        "others while nothing else is to do, or between steps.",
    )
    capture_prompts: bool = Field(
        True,
        description="Capture steps with prompts, too, in pieces between which attention runs as it is, for as many "
        "tokens as the device computes sooner than the host launches: when a size is met first, or while nothing else "
        "is to do.",
    )
    capture_draws: bool = Field(
        True,
        description="Capture beside each decode size its logits and the draw of requests that ask for nothing but a "
        "temperature.",
    )
    graph_memory_bytes: int | None = Field(
        None,
        ge=0,
        description="Memory kept for captured decode steps; once it is taken, no more are captured. Default: enough "
        "for all, by what the largest takes. Steps with prompts have theirs beside it.",
    )
    check_captured_inputs: bool = Field(
        False,
        description="Check before each replay of a captured step that all it reads lies where it lay; for debugging, "
        "as it costs about as much as the step.",
    )
    peer_memory: bool = Field(
        True,
        description="Sum over tensor ranks of one machine by kernels that read and write each other's memory; else all "
        "by NCCL.",
    )
    copied_sums: bool = Field(
        True,
        description="With two tensor ranks of one machine, sum what is too large for those kernels by copies between "
        "the devices, which run beside the products that make the values; else by NCCL.",
    )
    hopper_products: HopperProducts = Field(
        "measured",
        description="Which products our own kernels do, not the library: `deterministic`, on Hopper those of more than "
        "64 tokens in deterministic steps; `measured`, also those that were quicker than the library's when a start "
        "measured the shape on this device; `all`, on Hopper all of more than 64 tokens.",
    )
    hopper_experts: bool = Field(
        True,
        description="On Hopper, routed experts with many rows each by a kernel of their own, unless hopper_products is "
        "deterministic.",
    )


class CpuOptions(BaseModel):
    """Settings of the CPU platform."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    native_kernels: bool = Field(
        True,
        description="Compute steps of few tokens by kernels that the machine's C compiler makes when an engine starts, "
        "where there is one; else by torch.",
    )
    native_dtype: bool = Field(False, description="Let dtype=auto keep 16-bit weights instead of widening to float32.")
