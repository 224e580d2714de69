"""What becomes of plugins of other packages that fail: left out unless somebody named them, and named by the error."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.isolation import culprit
from frame.core.plugin_host.offers import OURS
from frame.core.plugin_host.registry import PluginError, Registry
from frame.core.server.app import make_endpoints
from frame.core.worker.sample.processors import load_processors
from frame.testing import FakeServing, make_setup

API = "api='>=0.2.dev1,<0.3'"
MODULE = """
from frame import Provider, hookimpl
from frame.interfaces import Endpoint, LogitsProcessor, SchedulerPolicy
from pydantic import BaseModel

class Options(BaseModel):
    level: int = 0

class Broken(LogitsProcessor):
    def __init__(self, setup, options=None):
        raise RuntimeError("no such table")
    def add(self, slot, params, prompt_ids, output_ids): return False
    def remove(self, slot): pass
    def apply(self, logits, slots): return logits

class Fragile(SchedulerPolicy):
    def __init__(self, setup, options=None):
        super().__init__(setup, options)
        raise ValueError("level must be above 0")
    def key(self, request): return ()

class Picky(SchedulerPolicy):
    def key(self, request): return self.fail()
    def fail(self): return int("x")

class Unroutable(Endpoint):
    def router(self): raise KeyError("path")

class Unbuildable(Endpoint):
    def __init__(self, setup, options=None): raise OSError("no disk")
    def router(self): ...

"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the registry of a package `broken` whose hook returns these providers."""

    def load(hook: str, providers: str) -> Registry:
        source = f"{MODULE}\n@hookimpl\ndef {hook}():\n    return [{providers}]\n"
        (tmp_path / "broken_plugins.py").write_text(source)
        info = tmp_path / "broken-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[frame]\nmain = broken_plugins\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "broken_plugins", raising=False)
        return Registry.load()

    yield load
    sys.modules.pop("broken_plugins", None)


def offer_of(registry: Registry, kind: str, name: str) -> Any:
    return next(offer for offer in registry.offers if (offer.kind, offer.provider.name) == (kind, name))


@pytest.mark.parametrize(
    ("target", "reason"), [("Broken", "no such table"), ("Missing", "has no attribute 'Missing'"), ("Fragile", "")]
)
def test_a_processor_that_fails_and_that_nobody_named_is_left_out(
    registry: Any, caplog: pytest.LogCaptureFixture, target: str, reason: str
) -> None:
    found = registry("frame_logits_processors", f"Provider('odd', 'broken_plugins:{target}', {API}, options=Options)")
    with caplog.at_level(logging.WARNING):
        assert load_processors(FrameConfig(), found, torch.device("cpu")) == []
    (record,) = [one.message for one in caplog.records if "odd" in one.message]
    assert record.startswith("logits processor 'odd' of package broken is left out: ")
    assert record.count("'odd'") == record.count("of package broken") == 1
    assert reason in record
    assert offer_of(found, "processor", "odd").problem in record
    assert load_processors(FrameConfig(), found, torch.device("cpu")) == []


@pytest.mark.parametrize("named", [{"logits_processors": ["odd"]}, {"plugin": {"odd": {"level": 1}}}])
def test_a_processor_that_was_named_ends_the_start(registry: Any, named: dict[str, Any]) -> None:
    found = registry("frame_logits_processors", f"Provider('odd', 'broken_plugins:Broken', {API}, options=Options)")
    with pytest.raises(PluginError, match=r"logits processor 'odd' of package broken cannot be built: .*no such table"):
        load_processors(FrameConfig.from_flat(**named), found, torch.device("cpu"))


@pytest.mark.parametrize("target", ["Unroutable", "Unbuildable", "Missing"])
def test_an_endpoint_that_fails_leaves_the_others_served(registry: Any, target: str) -> None:
    found = registry("frame_endpoints", f"Provider('odd', 'broken_plugins:{target}', {API})")
    made = make_endpoints(FrameConfig(), found, cast(Any, FakeServing()))
    assert len(made) > 3
    assert offer_of(found, "endpoint", "odd").problem


def test_a_constructor_that_fails_names_plugin_package_and_cause(registry: Any) -> None:
    found = registry("frame_schedulers", f"Provider('odd', 'broken_plugins:Fragile', {API})")
    message = "scheduling policy 'odd' of package broken cannot be built: level must be above 0"
    for kind in (PluginError, ValueError):
        with pytest.raises(kind, match=re.escape(message)):
            found.make("scheduler", "odd", make_setup("scheduler"))


def test_an_error_in_a_step_is_traced_to_the_plugin(registry: Any) -> None:
    found = registry("frame_schedulers", f"Provider('odd', 'broken_plugins:Picky', {API})")
    policy = found.make("scheduler", "odd", make_setup("scheduler"))
    with pytest.raises(ValueError, match="invalid literal") as caught:
        policy.key(None)
    assert culprit(found, caught.value) == "scheduling policy 'odd' of package broken"
    with pytest.raises(ZeroDivisionError) as ours:
        _ = 1 / 0
    assert culprit(found, ours.value) == ""


def test_a_model_name_that_is_offered_twice_is_ours_unless_a_package_is_named(
    registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = registry("frame_models", f"Provider('LlamaForCausalLM', 'broken_plugins:Llama', {API})")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert found.offer("model", "LlamaForCausalLM").package == OURS
    (warning,) = [record.message for record in caplog.records]
    assert "--model-plugin broken:LlamaForCausalLM takes that one" in warning
    assert found.offer("model", "broken:LlamaForCausalLM").package == "broken"
    config = FrameConfig.from_flat(model_plugin="broken:LlamaForCausalLM")
    (choice,) = [choice for choice in found.choices(config) if choice.kind == "model"]
    assert choice.package == "broken"
    with pytest.raises(PluginError, match="no model 'broken:Nonsense'"):
        found.check(FrameConfig.from_flat(model_plugin="broken:Nonsense"))


def test_a_package_cannot_take_the_place_of_a_command_of_ours(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = registry("frame_commands", f"Provider('plugins', 'broken_plugins:Mine', {API})")
    with caplog.at_level(logging.WARNING):
        assert found.offer("command", "plugins").package == OURS
    assert [record.message for record in caplog.records] == [
        "command 'plugins' is also offered by package broken; frame broken:plugins takes that one"
    ]
    assert found.offer("command", "broken:plugins").package == "broken"


@pytest.mark.parametrize("api", [">=0.2.dev1", ">=0.2.dev1,<0.4", ">=0.2.dev1,<1"])
def test_a_range_that_goes_past_the_next_minor_is_refused(registry: Any, api: str) -> None:
    found = registry("frame_schedulers", f"Provider('odd', 'broken_plugins:Picky', api={api!r})")
    with pytest.raises(PluginError, match=re.escape(f"its API range {api!r} goes past 0.3")):
        found.choose("scheduler", "odd")
