"""Platforms begin what they will wait for before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from frame import Provider
from frame.core.config.flat import from_flat
from frame.core.interfaces.setup import Setup
from frame.core.plugin_host.offers import Offer
from frame.core.plugin_host.registry import Registry
from frame.core.startup.early import begin_platforms

_BEGUN: list[Any] = []


def begin(setup: Any, options: Any) -> None:
    """What a platform's tag names."""
    _BEGUN.append((setup, options))


def fail(setup: Any, options: Any) -> None:
    """A platform that cannot."""
    raise RuntimeError("no such driver")


def platform(name: str, function: str = "") -> Offer:
    tags = {"early": f"{__name__}:{function}"} if function else {}
    return Offer(
        "platform", Provider(name, "nowhere:Platform", api=">=0.2.dev1,<0.3", tags=tags), f"package-{name}", "1"
    )


@pytest.mark.parametrize(
    ("chosen", "begun"),
    [("auto", ["one", "two"]), ("one", ["one"]), ("package-one:one", ["one"]), ("quiet", []), ("missing", [])],
)
def test_platforms_that_may_be_chosen_begin_with_a_setup_and_no_configuration(chosen: str, begun: list[str]) -> None:
    _BEGUN.clear()
    offers = [platform("one", "begin"), platform("broken", "fail"), platform("absent", "nothing"), platform("quiet")]
    config = from_flat({"platform": chosen})
    begin_platforms(config, Registry([*offers, platform("two", "begin")], []))
    assert [(Setup(plugin=f"package-{name}:{name}"), None) for name in begun] == _BEGUN


def test_an_engine_asks_before_it_imports_torch() -> None:
    script = (
        "import sys, frame.core.startup.early\n"
        "def stop(config, registry): raise SystemExit(3 + ('torch' in sys.modules))\n"
        "frame.core.startup.early.begin_platforms = stop\n"
        "from frame import LLM\n"
        "LLM()"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 3
