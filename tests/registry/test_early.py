"""Platforms begin what they will wait for before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from frame import Provider
from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import Offer
from frame.core.plugin_host.registry import Registry
from frame.core.startup.early import begin_platforms

_BEGUN: list[Any] = []


def begin(config: Any) -> None:
    """What a platform's tag names."""
    _BEGUN.append(config)


def fail(config: Any) -> None:
    """A platform that cannot."""
    raise RuntimeError("no such driver")


def platform(name: str, function: str = "") -> Offer:
    tags = {"early": f"{__name__}:{function}"} if function else {}
    return Offer(
        "platform", Provider(name, "nowhere:Platform", api=">=0.2.dev1,<0.3", tags=tags), f"package-{name}", "1"
    )


@pytest.mark.parametrize(
    ("chosen", "num_begun"), [("auto", 2), ("one", 1), ("package-one:one", 1), ("quiet", 0), ("missing", 0)]
)
def test_those_that_may_be_chosen_begin(chosen: str, num_begun: int) -> None:
    _BEGUN.clear()
    offers = [platform("one", "begin"), platform("broken", "fail"), platform("absent", "nothing"), platform("quiet")]
    config = from_flat({"platform": chosen})
    begin_platforms(config, Registry([*offers, platform("two", "begin")], []))
    assert [config] * num_begun == _BEGUN


def test_an_engine_asks_before_it_imports_torch() -> None:
    script = (
        "import sys, frame.core.startup.early\n"
        "def stop(config, registry): raise SystemExit(3 + ('torch' in sys.modules))\n"
        "frame.core.startup.early.begin_platforms = stop\n"
        "from frame import LLM\n"
        "LLM()"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 3
