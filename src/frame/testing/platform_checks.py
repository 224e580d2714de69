"""What the suites of platforms share: the platform, or the reason to skip, and how exact it must be."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from frame.core.interfaces.platform import Platform, PlatformSpec

from .plugin_suite import PluginSuite, reason_or_none

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class PlatformChecks(PluginSuite):
    """The parts of `PlatformSuite` derive from it."""

    kind = "platform"
    #: the checkpoint that is served
    architecture: ClassVar[str] = "LlamaForCausalLM"

    #: the most sizes (rows, tokens, samples) that a platform of static shapes has; 0: it takes any, none are counted
    max_sizes: ClassVar[int] = 0

    def tolerance(self, dtype: torch.dtype) -> float:
        """Largest absolute and relative difference of an op from its reference."""
        return _TOLERANCE[dtype]

    @pytest.fixture
    def platform(self) -> Platform:
        """A new platform; skips where there is no such device."""
        reason = reason_or_none(self.found().probe(), "probe")
        if reason is not None:
            pytest.skip(reason)
        made = self.make()
        assert isinstance(made, Platform), f"{type(made).__name__} does not derive from Platform"
        return made

    def dtypes(self, platform: Platform) -> list[torch.dtype]:
        """The element types that the platform computes in."""
        return [dtype for dtype in _DTYPES if platform.supports(PlatformSpec(dtype)) is None]
