"""What no platform here can do is refused, never ignored."""

from __future__ import annotations

import pytest

from frame import LLM


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_more_ranks_than_the_platform_serves_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="2 ranks asked for, one is supported"):
        LLM(**{name: 2})
