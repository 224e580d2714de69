"""Mamba and Falcon-Mamba: every layer is a norm and a selective state-space mixer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ModelSetup
from frame.layers import MambaMixer, MambaSpec

from .mamba2 import Backbone


class MambaForCausalLM(Backbone):
    """RMSNorm and Mamba-1 mixers."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(
            setup,
            options,
            eps=build.config.layer_norm_epsilon,
            make_mixer=lambda prefix, index: MambaMixer(build, prefix, _spec(build.config), self.norms(build)),
        )

    @staticmethod
    def norms(build: Build) -> list[nn.Module]:
        """What normalises steps, B and C in each layer: nothing."""
        del build
        return []


class FalconMambaForCausalLM(MambaForCausalLM):
    """As Mamba, with norms of steps, B and C that have no weights."""

    @staticmethod
    def norms(build: Build) -> list[nn.Module]:
        return [UnitNorm(build.config.mixer_rms_eps) for _ in range(3)]


class UnitNorm(nn.Module):
    """x / rms(x) over the last dimension, without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim], the statistics in float32."""
        value = x.float()
        out: Tensor = (value * (value.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)
        return out


def _spec(config: Any) -> MambaSpec:
    if config.hidden_act != "silu":
        raise ValueError(f"Mamba's convolution is followed by 'silu', not by {config.hidden_act!r}")
    return MambaSpec(
        config.hidden_size,
        config.intermediate_size,
        config.state_size,
        int(config.time_step_rank),
        config.conv_kernel,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
    )
