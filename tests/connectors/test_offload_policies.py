"""What the offload connector does with tier policies of packages that are wrong: one sentence, and no token changes."""

import re

import pytest

from frame import LLM
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.interfaces.mesh import Mesh
from frame.core.plugin_host.registry import Registry
from frame.interfaces import TierPolicySetup
from frame.plugins.connectors.offload.checked_policy import CheckedPolicy
from frame.plugins.tiers.arc import ArcPolicy
from frame.plugins.tiers.lru import LruPolicy
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.transfers.first_check import check_connector
from tests.connectors.test_offload import LAYOUTS, forget, room, suite_of


@pytest.mark.parametrize("shape", ["full", "states", "states alone"])
def test_a_policy_is_built_for_a_tier_that_there_is(tmp_path, monkeypatch, shape):
    """Its options may be checked against what the tier holds."""
    sizes = []

    def build(policy, setup, options=None):
        sizes.append(setup.num_blocks)
        start(policy, setup, options)

    start = LruPolicy.__init__
    monkeypatch.setattr(LruPolicy, "__init__", build)
    suite = suite_of(tmp_path, size=room(400))
    suite.engine(make_layout(200, **LAYOUTS[shape])).close()
    assert len(sizes) == (2 if shape == "states" else 1)
    assert min(sizes) > 8


def used(suite, engine):
    """The oldest of eight prompts have no room, and none is lost."""
    prompts = [suite.prompt(22, seed=seed) for seed in range(8)]
    for number, prompt in enumerate(prompts):
        engine.run(request(f"first-{number}", prompt))
    forget(engine)
    for number in reversed(range(8)):
        engine.run(request(f"again-{number}", prompts[number]))
    engine.check()
    assert engine.num_cached("again-7") > 0


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("answer", [b"nobody's", 7, [1], None])
def test_a_block_that_may_not_go_is_refused(tmp_path, monkeypatch, caplog, answer):
    monkeypatch.setattr(ArcPolicy, "evict", lambda policy, incoming, kept: incoming if answer is None else answer)
    suite = suite_of(tmp_path, size=room(8), policy="arc")
    engine = suite.engine(make_layout(200))
    used(suite, engine)
    engine.close()
    (problem,) = said(caplog)
    begun = "tier policy 'arc' failed in evict, so the blocks unused for longest go from now on: ValueError: "
    assert problem.startswith(begun)
    assert problem.endswith(" is none of the blocks that are held and not in use")


@pytest.mark.parametrize("method", ["insert", "touch", "evict", "remove"])
@pytest.mark.parametrize("later", [False, True])
def test_a_policy_that_raises_is_replaced(tmp_path, monkeypatch, caplog, method, later):
    def broken(policy, *arguments):
        raise RuntimeError("told\nto fail")

    suite = suite_of(tmp_path, size=room(8), policy="arc")
    engine = suite.engine(make_layout(200))
    if later:
        engine.run(request("before", suite.prompt(30, seed=9)))
    monkeypatch.setattr(ArcPolicy, method, broken)
    used(suite, engine)
    assert engine.engine.call("reset_prefix_cache", {"reset_connector": True})
    engine.run(request("after", suite.prompt(22, seed=7)))
    assert engine.num_cached("after") == 0
    engine.check()
    engine.close()
    told = "so the blocks unused for longest go from now on: RuntimeError: told to fail"
    assert said(caplog) == [f"tier policy 'arc' failed in {method}, {told}"]


def test_a_block_that_is_read_is_refused(caplog):
    setup = TierPolicySetup(num_blocks=2)
    made, held = LruPolicy(setup), {b"read", b"other"}
    policy = CheckedPolicy(setup, made, "mine", held, lambda: LruPolicy(setup))
    policy.insert([b"other"])
    policy.insert([b"read"])
    made.evict = lambda incoming, kept: b"read"
    assert policy.evict(b"next", {b"read": 1}) == b"other"
    (problem,) = said(caplog)
    assert "b'read' is none of the blocks that are held and not in use" in problem


@pytest.mark.parametrize("name", ["lrx", "frame-llm:lrx"])
def test_a_policy_that_no_package_has_is_told_before_anything_is_loaded(name, tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"no weights")
    settings = {"kv_connector": "offload", "plugin": {"offload": {"size": 0.01, "policy": name}}}
    said = f"KV connector 'offload': option policy: no tier policy '{name}'; there are: lru, arc"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        LLM(str(folder), skip_tokenizer_init=True, **settings)


def test_so_is_one_of_a_connector_that_another_one_holds():
    held = {"kv_connector": "offload", "options": {"size": 0.01, "policy": "lrx"}}
    settings = {"kv_connector": "multi", "plugin": {"multi": {"connectors": [held]}}}
    with pytest.raises(ConfigError, match="'multi', 'offload' in it: option policy: no tier policy 'lrx'"):
        check_connector(from_flat(settings), Mesh(), Registry.load())


def test_a_named_policy_of_frame_passes():
    for name in ("arc", "frame-llm:arc"):
        settings = {"kv_connector": "offload", "plugin": {"offload": {"size": 0.01, "policy": name}}}
        check_connector(from_flat(settings), Mesh(), Registry.load())


@pytest.mark.parametrize(
    ("connector", "options", "told"),
    [
        (
            None,
            {"offload": {"policy": "lru", "size": 1.0}},
            ["'offload' have no effect (policy, size): this engine has no"],
        ),
        (None, {"OffloadingConnector": {"size": 1.0}}, ["'OffloadingConnector' have no effect (size)"]),
        (
            "disk",
            {"offload": {"size": 1.0}, "disk": {"folder": "there"}},
            ["'offload' have no effect (size): this engine's KV connector is 'disk'"],
        ),
        (
            "multi",
            {"offload": {"size": 1.0}, "disk": {"fsync": True}, "lru": {}},
            ["'offload' have no effect (size)", "'multi'"],
        ),
        ("offload", {"offload": {"size": 0.001}}, []),
        ("OffloadingConnector", {"offload": {"size": 0.001}, "arc": {}}, []),
        (None, {"cpu": {"native_kernels": False}}, []),
    ],
)
def test_options_of_a_connector_that_an_engine_has_not_are_named_in_the_log(caplog, connector, options, told):
    """Those of other plugins are not: a platform, say, is chosen by itself."""
    if connector == "multi":
        options = {**options, "multi": {"connectors": [{"kv_connector": "disk", "options": {"folder": "there"}}]}}
    settings = {"kv_connector": connector} if connector else {}
    check_connector(from_flat({**settings, "plugin": options}), Mesh(), Registry.load())
    lines = [one.getMessage() for one in caplog.records if "no effect" in one.getMessage()]
    assert len(lines) == bool(told)
    assert all(part in lines[0] for part in told)


def test_one_engine_of_several_names_options_without_effect(caplog):
    settings = {"data_parallel_size": 3, "plugin": {"offload": {"size": 1.0}}}
    config = from_flat(settings)
    for rank in range(3):
        own = config.model_copy(update={"data_parallel": config.data_parallel.engine(rank)})
        check_connector(own, Mesh(), Registry.load())
    assert len([one for one in caplog.records if "no effect" in one.getMessage()]) == 1
