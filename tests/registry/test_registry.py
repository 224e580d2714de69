"""Loading from entry points, choosing by name, and the sentence for what cannot be had."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.provider import API_VERSION, NEXT_MINOR
from frame.core.plugin_host.kinds import HOOKS
from frame.core.plugin_host.model_registry import ModelRegistry
from frame.core.plugin_host.registry import PluginError, Registry
from frame.testing import make_setup

MODULE = """
from frame import Provider, hookimpl
from frame.interfaces import SchedulerPolicy
from pydantic import BaseModel

class Options(BaseModel):
    depth: int = 1
    name: str = "x"

class Policy(SchedulerPolicy):
    def key(self, request):
        return ()

class Partial(SchedulerPolicy):
    pass

class Other:
    pass

@hookimpl
def frame_schedulers():
    return [{providers}]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package of one module into a folder on sys.path."""

    def install(name: str, source: str, version: str = "1.0", folder: str = "a") -> Path:
        root = tmp_path / folder
        info = root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        module = name.replace("-", "_")
        (root / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[frame]\nmain = {module}\n")
        if str(root) not in sys.path:
            monkeypatch.syspath_prepend(str(root))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return root

    yield install
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]


def policy(name: str = "lifo", *, module: str = "fake_one", target: str = "Policy", more: str = "") -> str:
    return f"Provider({name!r}, '{module}:{target}', api='>=0.2.dev1,<0.3'{more})"


SETUP = make_setup("scheduler")


def source(*providers: str) -> str:
    return MODULE.replace("{providers}", ", ".join(providers))


def test_defaults_are_there_and_light():
    registry = Registry.load()
    assert {offer.package for offer in registry.offers} >= {"frame-llm"}
    assert registry.choose("platform", "cpu").name == "cpu"


def test_installed_package_is_chosen_built_and_given_options(package):
    package("fake-one", source(policy(more=", options='fake_one:Options', aliases=('stack',)")))
    registry = Registry.load()
    config = FrameConfig.from_flat(plugin={"lifo": {"depth": "3"}})
    made = registry.make("scheduler", "stack", SETUP, config)
    assert made.options.depth == 3
    assert made.setup == replace(SETUP, plugin="fake-one:lifo")
    assert registry.make("scheduler", registry.choose("scheduler", "fake-one:lifo"), SETUP, config).options.depth == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deep": 1}, "plugin 'lifo' has no option 'deep'; there are: depth, name"),
        ({"depth": "x"}, "option depth of plugin 'lifo' must be a valid integer, unable to parse string as an integer"),
    ],
)
def test_wrong_options_name_the_field(package, settings, message):
    package("fake-one", source(policy(more=", options=Options")))
    registry = Registry.load()
    with pytest.raises(PluginError, match=re.escape(message)):
        registry.make("scheduler", "lifo", SETUP, FrameConfig.from_flat(plugin={"lifo": settings}))


def test_a_wrong_option_that_has_an_alias_is_named(package):
    text = source(policy(more=", options=Options")).replace("depth: int = 1", "depth: int = Field(alias='deep')")
    package("fake-one", text.replace("import BaseModel", "import BaseModel, Field"))
    with pytest.raises(PluginError, match="option deep of plugin 'lifo' is missing"):
        Registry.load().make("scheduler", "lifo", SETUP, FrameConfig.from_flat(plugin={"lifo": {"depth": 1}}))


def test_a_wrong_secret_is_not_shown(package):
    text = source(policy(more=", options=Options")).replace("depth: int = 1", "key: SecretStr | None = None")
    package("fake-one", text.replace("import BaseModel", "import BaseModel, SecretStr"))
    with pytest.raises(PluginError, match="option key of plugin 'lifo' must be") as caught:
        Registry.load().make("scheduler", "lifo", SETUP, FrameConfig.from_flat(plugin={"lifo": {"key": 12345}}))
    assert "12345" not in str(caught.value)


def test_options_for_a_plugin_without_any_are_refused(package):
    package("fake-one", source(policy()))
    with pytest.raises(PluginError, match="takes no options, got a"):
        Registry.load().make("scheduler", "lifo", SETUP, FrameConfig.from_flat(plugin={"lifo": {"a": 1}}))


def test_unknown_name_lists_the_choices(package):
    package("fake-one", source(policy()))
    with pytest.raises(PluginError, match=r"no scheduling policy 'lif'; there are: .*lifo"):
        Registry.load().choose("scheduler", "lif")


def test_two_packages_with_one_name_must_be_named(package):
    package("fake-one", source(policy()))
    package("fake-two", source(policy(module="fake_two")))
    registry = Registry.load()
    with pytest.raises(PluginError, match="offered by 2 packages; name one of 'fake-one:lifo', 'fake-two:lifo'"):
        registry.choose("scheduler", "lifo")
    assert registry.choose("scheduler", "Fake_Two:lifo").target == "fake_two:Policy"


def test_one_package_with_a_name_twice_is_an_error(package):
    package("fake-one", source(policy(), policy()))
    with pytest.raises(PluginError, match="'lifo' is offered 2 times by package fake-one"):
        Registry.load().choose("scheduler", "lifo")


def test_stale_metadata_offers_nothing_twice(package, monkeypatch):
    package("fake-one", source(policy()), folder="a")
    package("fake-one", source(policy()), version="0.9", folder="b")
    assert Registry.load().choose("scheduler", "lifo").name == "lifo"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemError('early')", "SystemError: early"),
        (
            "from frame import hookimpl\n@hookimpl\ndef frame_scheduler():\n    return []\n",
            "no hook 'frame_scheduler' (did you mean frame_schedulers",
        ),
        (
            "from frame import hookimpl\n@hookimpl\ndef frame_schedulers():\n    return 'lifo'\n",
            "hook frame_schedulers must return a list of Provider, got 'lifo'",
        ),
        (
            "from frame import hookimpl\n@hookimpl\ndef frame_schedulers():\n    raise OSError('disk')\n",
            "OSError: disk",
        ),
    ],
)
def test_a_broken_package_is_reported_and_affects_no_other(package, text, reason):
    package("fake-broken", text)
    package("fake-one", source(policy()))
    registry = Registry.load()
    assert registry.choose("scheduler", "lifo").name == "lifo"
    (failure,) = registry.failures
    assert failure.package == "fake-broken"
    assert reason in failure.reason
    with pytest.raises(PluginError, match=re.escape(reason)):
        registry.choose("scheduler", "mine")


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ("'odd', 'fake_one:Policy'", "provider 'odd' lacks api; "),
        ("'odd'", "provider 'odd' lacks target, api; "),
        ("target='fake_one:Policy', api='>=0.2,<0.3'", "provider '' lacks name; "),
        ("'odd', 'fake_one:Policy', apis='>=0.2,<0.3'", "provider 'odd' lacks api and has no field apis; "),
    ],
)
def test_missing_or_unknown_fields_of_a_provider_are_one_sentence(package, fields, wrong):
    package("fake-one", source(f"Provider({fields})"))
    (failure,) = Registry.load().failures
    assert failure.package == "fake-one"
    assert failure.reason == (
        f"{wrong}write Provider('NAME', 'package.module:Class', api='>={API_VERSION},<{NEXT_MINOR}')"
    )


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_module_without_hooks_and_a_folder_that_is_no_package_are_failures(package, is_folder):
    root = package("fake-empty", "x = 1")
    if is_folder:
        (root / "fake_empty.py").unlink()
        (root / "fake_empty").mkdir()
    (failure,) = Registry.load().failures
    words = "is a folder without __init__.py" if is_folder else "has no hook of frame"
    assert failure.reason == f"fake_empty {words}, so that it offers nothing"


def test_an_api_range_that_excludes_this_version_fails_only_when_the_plugin_is_chosen(package):
    package("fake-one", source("Provider('old', 'fake_one:Policy', api='<0.1')", policy()))
    registry = Registry.load()
    assert [provider.name for provider in registry.providers("scheduler")].count("old") == 0
    with pytest.raises(PluginError, match=f"written for plugin API <0.1, this frame has {re.escape(API_VERSION)}"):
        registry.choose("scheduler", "old")


@pytest.mark.parametrize("api", ["'about 1'", "''", "5", "None", "['>=0.1']"])
def test_nonsense_api_range_is_named(package, api):
    package("fake-one", source(f"Provider('odd', 'fake_one:Policy', api={api})"))
    with pytest.raises(PluginError, match=re.escape(f"API range {api} is no version range")):
        Registry.load().choose("scheduler", "odd")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Missing", "cannot be imported from fake_one:Missing: AttributeError"),
        ("Other", "fake_one:Other does not derive from SchedulerPolicy"),
        ("Partial", "fake_one:Partial lacks key"),
        ("frame_schedulers", "fake_one:frame_schedulers is no class"),
    ],
)
def test_unusable_target_names_plugin_package_and_cause(package, target, message):
    package("fake-one", source(policy(target=target)))
    registry = Registry.load()
    with pytest.raises(PluginError, match=re.escape(message)) as caught:
        registry.resolve(registry.choose("scheduler", "lifo"))
    assert "scheduling policy 'lifo' of package fake-one" in str(caught.value)


def test_auto_takes_the_most_preferred_that_can(package):
    package("fake-one", source(policy("low"), policy("high", target="Partial", more=", preference=9")))
    registry = Registry.load()
    registry.offers = [offer for offer in registry.offers if offer.package == "fake-one"]
    chosen = registry.select("scheduler", "auto", lambda kind: None)
    assert chosen.name == "low"  # "high" does not import as a policy
    with pytest.raises(PluginError, match=r"no scheduling policy can be used here; high: .*; low: too slow"):
        registry.select("scheduler", "auto", lambda kind: "too slow")
    with pytest.raises(PluginError, match="scheduling policy 'low' cannot be used here: too slow"):
        registry.select("scheduler", "low", lambda kind: "too slow")


def test_a_choice_is_logged_once_and_in_few_words(package, caplog):
    package("fake-one", source(policy("a", more=", preference=3"), policy("b", target="Policy")))
    registry = Registry.load()
    registry.offers = [offer for offer in registry.offers if offer.package == "fake-one"]
    reasons = iter(("too slow", None, "too slow", None, "too slow " * 20, None, "too slow " * 21, None))
    with caplog.at_level(logging.DEBUG, "frame"):
        for _ in range(4):
            registry.select("scheduler", "auto", lambda kind: next(reasons))
        registry.offers.pop(0)
        registry.select("scheduler", "auto", lambda kind: None)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "scheduling policy: b (auto; not a: too slow)"),
        ("INFO", "scheduling policy: b (auto; a cannot be used, --log-level debug says why)"),
        ("DEBUG", f"scheduling policy: b (auto; not a: {'too slow ' * 20})"),
        ("DEBUG", f"scheduling policy: b (auto; not a: {'too slow ' * 21})"),
        ("DEBUG", "scheduling policy: b (auto)"),  # there was no other
    ]


def test_auto_tie_is_an_error(package):
    package("fake-one", source(policy("a"), policy("b")))
    registry = Registry.load()
    registry.offers = [offer for offer in registry.offers if offer.package == "fake-one"]
    with pytest.raises(PluginError, match="a and b have the same preference 0"):
        registry.select("scheduler", "auto", lambda kind: None)


def test_classes_may_overrule_the_preference(package):
    package("fake-one", source(policy("a", more=", preference=3"), policy("b", target="Policy")))
    registry = Registry.load()
    registry.offers = [offer for offer in registry.offers if offer.package == "fake-one"]
    ranks = iter((1, 2))
    assert registry.select("scheduler", "auto", lambda kind: None, lambda kind: next(ranks)).name == "b"


def test_children_load_exactly_what_the_parent_chose(package):
    package("fake-one", source(policy()))
    package("fake-two", source(policy("other", module="fake_two")))
    config = FrameConfig.from_flat(scheduling_policy="lifo")
    choices = [list(choice) for choice in Registry.load().choices(config)]
    del sys.modules["fake_two"]
    child = Registry.load(only=choices)
    assert [provider.name for provider in child.providers("scheduler")] == ["lifo"]
    assert child.choose("platform", "cpu").name == "cpu"
    assert "fake_two" not in sys.modules
    with pytest.raises(PluginError, match="no scheduling policy 'fake-gone:lifo'"):
        Registry.load(only=[("scheduler", "fake-gone", "lifo")])


def test_children_load_what_serves_beside_a_named_plugin():
    config = FrameConfig.from_flat(attention_backend="torch-latent", quantization="awq")
    child = Registry.load(only=[list(choice) for choice in Registry.load().choices(config)])
    assert {"torch", "torch-index", "torch-latent"} <= {one.name for one in child.providers("attention")}
    assert {"awq", "fp8", "int8"} <= {one.name for one in child.providers("quantization")}


def test_configured_names_are_checked_before_anything_starts(package):
    package("fake-one", source(policy(more=", options=Options")))
    registry = Registry.load()
    registry.check(FrameConfig.from_flat(scheduling_policy="lifo", plugin={"lifo": {"depth": 2}}))
    with pytest.raises(PluginError, match=r"no plugin 'lfio' to configure \(did you mean lifo"):
        registry.check(FrameConfig.from_flat(plugin={"lfio": {}}))
    with pytest.raises(PluginError, match="no attention backend 'fa9'; there are:"):
        registry.check(FrameConfig.from_flat(attention_backend="fa9"))
    for setting, noun in (("adapter_plugin", "adapter plugin"), ("lora_resolver", "adapter resolver")):
        with pytest.raises(PluginError, match=f"no {noun} 'lroa'; there are:"):
            registry.check(FrameConfig.from_flat(**{"enable_lora": True, setting: "lroa"}))
    for plugin, message in (("lifo", "'lifo' has no option 'deep'"), ("cuda", "'cuda' has no option 'deep'")):
        with pytest.raises(PluginError, match=message):
            registry.check(FrameConfig.from_flat(plugin={plugin: {"deep": 2}}))


def test_options_of_the_default_plugins_need_nothing_heavy():
    registry = Registry.load()
    modules = {str(offer.provider.options).partition(":")[0] for offer in registry.offers if offer.provider.options}
    heavy = ("torch", "opentelemetry.sdk", "llguidance", "transformers")
    code = f"import sys, {', '.join(sorted(modules))}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_models_of_this_process(monkeypatch):
    import torch

    from frame.interfaces import Model

    class Mine(Model):
        def forward(self, *arguments, **named):
            return torch.empty(0)

        def logits(self, hidden):
            return hidden

    monkeypatch.setattr(ModelRegistry, "models", {})
    ModelRegistry.register_model("MineForCausalLM", Mine)
    ModelRegistry.register_model("LlamaForCausalLM", "elsewhere.module:Llama")
    registry = Registry.load()
    assert registry.resolve(registry.choose("model", "MineForCausalLM")) is Mine
    assert registry.choose("model", "LlamaForCausalLM").target == "elsewhere.module:Llama"
    choices = registry.choices(FrameConfig())
    assert ("model", "this-process", "LlamaForCausalLM", "elsewhere.module:Llama") in choices
    assert "MineForCausalLM" in ModelRegistry.get_supported_archs()
    with pytest.raises(ValueError, match=r"must be a class or 'package.module:Class', got 'nonsense'"):
        ModelRegistry.register_model("X", "nonsense")


def test_connector_has_a_worker_part(package):
    text = """
from frame import Provider, hookimpl
from frame.interfaces import NullConnectorScheduler, NullConnectorWorker

class Left(NullConnectorScheduler):
    pass

@hookimpl
def frame_kv_connectors():
    return [
        Provider("both", "fake_one:Left", api=">=0.2.dev1,<0.3", tags={"worker": "fake_one:NullConnectorScheduler"}),
        Provider("half", "fake_one:Left", api=">=0.2.dev1,<0.3"),
    ]
"""
    package("fake-one", text)
    registry = Registry.load()
    assert registry.resolve(registry.choose("connector", "both")).__name__ == "Left"
    with pytest.raises(PluginError, match="does not derive from ConnectorWorker"):
        registry.resolve(registry.choose("connector", "both"), "worker")
    with pytest.raises(PluginError, match="names no worker part"):
        registry.resolve(registry.choose("connector", "half"), "worker")


def test_every_hook_is_documented_with_its_signature():
    text = Path(__file__, "../../../docs/plugins/hooks.md").resolve().read_text()
    for name, spec in vars(HOOKS).items():
        assert f"`{name}{inspect.signature(spec)}`".replace("'", "") in text
