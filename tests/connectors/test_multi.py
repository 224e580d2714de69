"""The multi connector: connectors that answer as they are told, and real ones under frame's scheduler."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from frame import LLM, SamplingParams
from frame.core.config.errors import ConfigError
from frame.core.interfaces.wire import decode, encode
from frame.core.plugin_host.registry import PluginError
from frame.interfaces import ConnectorScheduler, ConnectorWorker, LayerHooks, RequestView, TransferReport
from frame.plugins.connectors.multi.messages import ChildNote, MultiOptions, MultiStep
from frame.plugins.connectors.multi.scheduler import MultiScheduler
from frame.plugins.connectors.multi.worker import MultiWorker
from frame.testing import ConnectorSuite, make_setup
from frame.testing.checkpoints import make_checkpoint
from frame.testing.connector_suite import empty_plan
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.transfers import holds
from tests.connectors.nixl_pairs import Pairs, counter


class Told(ConnectorScheduler):
    """Answers as `answers` says by method, an exception by raising it; notes its calls."""

    def __init__(self, setup, answers):
        super().__init__(setup)
        self.answers, self.calls = answers, []

    def _call(self, name, *arguments, otherwise=None):
        self.calls.append((name, *arguments))
        answer = self.answers.get(name, otherwise)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]

    def connect(self, handshakes):
        self._call("connect", handshakes)

    def matched_tokens(self, request, num_computed):
        return self._call("matched_tokens", otherwise=(0, False))

    def allocated(self, request, block_ids, num_external):
        self._call("allocated", block_ids, num_external)

    def build_message(self, plan):
        return self._call("build_message", otherwise=b"")

    def finished(self, request, block_ids):
        return self._call("finished", otherwise=(False, None))

    def update(self, report):
        return self._call("update", report)

    def reset(self):
        return self._call("reset", otherwise=True)

    def close(self):
        self._call("close")


def told(*answers, ranks=1, plugins=("one", "two")):
    """A multi connector over `Told`s, and these."""
    made = []

    def make(kind, name, setup, options, part=""):
        assert kind == "connector"
        made.append(Told(replace(setup, plugin=f"package:{name}"), options))
        return made[-1]

    options = MultiOptions.model_validate(
        {
            "connectors": [
                {"kv_connector": name, "options": one}
                for name, one in zip(plugins[: len(answers)], answers, strict=True)
            ]
        }
    )
    multi = MultiScheduler(make_setup("connector", layout=make_layout(), make=make), options)
    multi.connect(
        {rank: encode([f"{rank}-{place}".encode() for place in range(len(answers))]) for rank in range(ranks)}
    )
    return multi, made


def view(name="a"):
    return RequestView(request_id=name, token_ids=range(22), block_hashes=[b"%d" % n for n in range(5)], prompt_len=22)


BLOCKS = [[1, 2, 3, 4]]


def step_of(multi):
    message = multi.build_message(empty_plan(0))
    return decode(message, MultiStep) if message else None


def note(place, rank=0, **report):
    return rank, encode(ChildNote(place, TransferReport(**report)))


def test_the_first_hit_wins_and_the_others_get_the_blocks_too():
    multi, (one, two) = told({"matched_tokens": (0, False)}, {"matched_tokens": (8, True)})
    assert multi.matched_tokens(view(), 0) == (8, True)
    multi.allocated(view(), BLOCKS, 8)
    assert one.of("allocated") == [(BLOCKS, 0)]
    assert two.of("allocated") == [(BLOCKS, 8)]


def test_one_that_needs_time_is_waited_for_when_all_were_asked():
    multi, (one, two) = told({"matched_tokens": (None, False)}, {"matched_tokens": (8, True)})
    assert multi.matched_tokens(view(), 0) == (None, False)
    assert len(two.of("matched_tokens")) == 1
    one.answers["matched_tokens"] = (4, False)
    assert multi.matched_tokens(view(), 0) == (4, True)


def test_a_choice_is_forgotten_with_a_later_miss():
    multi, (one, two) = told({"matched_tokens": (8, True)}, {"matched_tokens": (4, True)})
    multi.matched_tokens(view(), 0)
    one.answers["matched_tokens"] = (0, False)
    assert multi.matched_tokens(view(), 0) == (4, True)
    multi.allocated(view(), BLOCKS, 4)
    assert (one.of("allocated"), two.of("allocated")) == ([(BLOCKS, 0)], [(BLOCKS, 4)])
    multi.matched_tokens(view(), 0)
    two.answers["matched_tokens"] = (0, False)
    assert multi.matched_tokens(view(), 0) == (0, False)
    multi.allocated(view(), BLOCKS, 0)
    assert two.of("allocated")[1:] == [(BLOCKS, 0)]


def test_handshakes_and_notes_reach_whose_they_are():
    multi, (one, two) = told({}, {}, ranks=2)
    assert one.of("connect") == [({0: b"0-0", 1: b"1-0"},)]
    assert two.of("connect") == [({0: b"0-1", 1: b"1-1"},)]
    notes = [note(1, rank, notes=[(rank, b"mine")], failed_blocks=[(0, 3)], events=[b"e"]) for rank in (0, 1)]
    multi.update(TransferReport(notes=notes))
    ((mine,),) = two.of("update")
    assert mine == TransferReport(notes=[(0, b"mine"), (1, b"mine")], failed_blocks=[(0, 3)], events=[b"e"])
    assert one.of("update") == [(TransferReport(),)]


def test_one_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"^connector two: no such mesh$"):
        told({}, {"connect": ValueError("no such mesh")})


def test_blocks_are_given_back_when_all_who_hold_them_have_said_so():
    multi, _ = told({"finished": (True, None)}, {"finished": (True, None)}, ranks=2)
    assert multi.finished(view(), BLOCKS) == (True, None)
    for place, rank in ((0, 0), (0, 0), (1, 1), (0, 1)):  # no rank speaks for another, nor one connector for another
        assert multi.update(TransferReport(notes=[note(place, rank, sent=["a"])])) == []
    assert multi.update(TransferReport(notes=[note(1, 0, sent=["a"])])) == ["a"]
    assert multi.update(TransferReport(notes=[note(1, 0, sent=["a"])])) == []


def test_blocks_are_given_back_by_a_scheduler_side_too():
    multi, (one, two) = told({"finished": (True, None)}, {"finished": (True, None)})
    multi.finished(view(), BLOCKS)
    one.answers["update"] = ["a"]
    assert multi.update(TransferReport()) == []
    two.answers["update"] = ["a", "never heard of"]
    assert multi.update(TransferReport()) == ["a"]


def test_of_two_that_give_parameters_neither_is_taken(caplog):
    multi, (one, _) = told({"finished": (True, {"x": 1})}, {"finished": (True, {"y": 1})})
    with caplog.at_level(logging.ERROR):
        assert multi.finished(view(), BLOCKS) == (True, None)
    assert "connectors one and two each give parameters for the answer of request a" in caplog.text
    one.answers["finished"] = (False, None)
    assert multi.finished(view("b"), BLOCKS) == (True, {"y": 1})


def test_twins_keep_their_numbers():
    multi, _ = told({}, {}, {}, plugins=("disk", "one", "disk"))
    report = TransferReport(
        notes=[
            note(0, counters={"disk_loaded_blocks": 1.0, "files": 2.0}),
            note(1, counters={"one_files": 3.0, "files": 4.0}),
            note(2, counters={"disk_loaded_blocks": 5.0}, gauges={"disk_used": 6.0}),
        ]
    )
    multi.update(report)
    assert report.counters == {
        "disk_0_loaded_blocks": 1.0,
        "disk_0_files": 2.0,
        "one_files": 7.0,
        "disk_1_loaded_blocks": 5.0,
    }
    assert report.gauges == {"disk_1_used": 6.0}


def test_reset_asks_all_and_is_done_when_all_could():
    multi, (one, two) = told({"reset": False}, {})
    assert multi.reset() is False
    assert two.of("reset") == [()]
    one.answers["reset"] = RuntimeError("broken")
    assert multi.reset() is False
    one.answers["reset"] = True
    assert multi.reset() is True


def test_all_are_closed_before_an_error_is_raised():
    multi, (_, two) = told({"close": RuntimeError("first")}, {})
    with pytest.raises(RuntimeError, match="first"):
        multi.close()
    assert two.of("close") == [()]


def test_one_that_cannot_be_built_closes_the_others():
    closed = []

    class Closing(Told):
        def close(self):
            closed.append(self)

    def make(kind, name, setup, options, part=""):
        if name == "two":
            raise ValueError("no room")
        return Closing(setup, options)

    options = MultiOptions.model_validate({"connectors": [{"kv_connector": name} for name in ("one", "two")]})
    with pytest.raises(ValueError, match="no room"):
        MultiScheduler(make_setup("connector", layout=make_layout(), make=make), options)
    assert len(closed) == 1


@pytest.mark.parametrize("method", ["matched_tokens", "finished", "update"])
def test_one_that_raises_costs_its_own_help(method):
    multi, (one, two) = told({method: RuntimeError("broken")}, {"matched_tokens": (8, True), "finished": (True, None)})
    assert multi.matched_tokens(view(), 0) == (8, True)
    multi.allocated(view(), BLOCKS, 8)
    assert two.of("allocated") == [(BLOCKS, 8)]
    assert len(one.of("allocated")) == (method != "matched_tokens"), "it hears no more of what it raised about"
    assert multi.finished(view(), BLOCKS) == (True, None)
    assert multi.update(TransferReport(notes=[note(1, sent=["a"])])) == ["a"]
    assert multi.matched_tokens(view("b"), 0) == (8, True)


@pytest.mark.parametrize("method", ["allocated", "build_message"])
@pytest.mark.parametrize("later", [False, True])
def test_loads_of_one_that_raises_are_told_as_failed(method, later):
    multi, (one, two) = told({"matched_tokens": (8, later), method: RuntimeError("broken")}, {"build_message": b"mine"})
    multi.matched_tokens(view(), 0)
    multi.allocated(view(), BLOCKS, 8)
    step = step_of(multi)
    assert step.messages == [b"", b"mine"]
    ((number, owner, failed),) = [(one.number, one.owner, one.failed) for one in step.ended]
    assert (owner, failed) == ("a", [(0, 3), (0, 4)])
    assert step_of(multi).ended[0].number == number, "until it is read"
    multi.update(TransferReport(received=["a"], failed_blocks=failed))
    assert step_of(multi).ended == []
    multi.matched_tokens(view("b"), 0)
    assert len(one.of("matched_tokens")) == 1, "a later message could load into blocks of others"
    assert len(two.of("matched_tokens")) == 2


@pytest.mark.parametrize("method", ["allocated", "build_message", "update"])
def test_blocks_that_one_holds_which_has_failed_go_back_in_time(method, monkeypatch, caplog):
    """Its workers may never have heard that they are to read them."""
    now = [0.0]
    monkeypatch.setattr(holds.time, "monotonic", lambda: now[0])
    held = {"matched_tokens": (0, False), "finished": (True, {"ticket": 1})}
    multi, _ = told({**held, method: RuntimeError("broken")}, {})
    multi.matched_tokens(view(), 0)
    multi.allocated(view(), BLOCKS, 0)
    multi.build_message(empty_plan(0))
    multi.update(TransferReport())
    assert multi.finished(view(), BLOCKS) == (True, {"ticket": 1})
    now[0] += holds.MAX_SECONDS - 1
    assert list(multi.update(TransferReport())) == []
    now[0] += 2
    assert list(multi.update(TransferReport())) == ["a"]
    assert list(multi.update(TransferReport())) == []
    assert "package:one" in caplog.text


def test_one_that_fell_silent_hears_nothing_of_requests_that_come_later():
    multi, (one, two) = told({"build_message": RuntimeError("broken"), "finished": (True, {"ticket": 1})}, {})
    multi.build_message(empty_plan(0))
    multi.matched_tokens(view("b"), 0)
    multi.allocated(view("b"), BLOCKS, 0)
    assert multi.finished(view("b"), BLOCKS) == (False, None)
    assert not one.of("finished")
    assert two.of("finished")


class Side(ConnectorWorker):
    def __init__(self, setup, options):
        super().__init__(setup, options)
        self.report = TransferReport()
        self.error = None

    def register(self, caches):
        pass

    def begin_step(self, message):
        self.message = message

    def end_step(self, finished):
        if self.error is not None:
            raise self.error
        report, self.report = self.report, TransferReport()
        return report

    def handshake(self):
        return b"hello"


class Noting(LayerHooks):
    def __init__(self):
        self.calls = []

    def before(self, layer, batch):
        self.calls.append(layer)


class NotingDecodes(Noting):
    decode_steps = True


def sides(*hooks):
    made = []

    def make(kind, name, setup, options, part=""):
        assert part == "worker"
        made.append(Side(setup, options))
        if hooks:
            made[-1].hooks = hooks[len(made) - 1]
        return made[-1]

    options = MultiOptions.model_validate({"connectors": [{"kv_connector": "x"}] * max(2, len(hooks))})
    worker = MultiWorker(make_setup("connector", part="worker", layout=make_layout(), make=make), options)
    worker.register({})
    return worker, made


def test_a_report_is_kept_for_the_next_step_where_another_connector_raises():
    worker, (one, two) = sides()
    assert worker.handshake() == encode([b"hello", b"hello"])
    worker.begin_step(encode(MultiStep([b"m", b""])))
    assert (one.message, two.message) == (b"m", b"")
    one.error, two.report = RuntimeError("broken"), TransferReport(received=["a"])
    with pytest.raises(RuntimeError, match="broken"):
        worker.end_step([])
    one.error = None
    worker.begin_step(b"")
    report = worker.end_step([])
    assert report.received == ["a"]
    assert report.notes == [note(1, received=["a"])]


def test_hooks_of_all_are_called_and_those_of_decode_steps_alone_in_these():
    several, single = (type("Batch", (), {"max_query_len": length}) for length in (4, 1))
    assert type(sides()[0].hooks) is LayerHooks
    quiet = Noting()
    assert sides(LayerHooks(), quiet)[0].hooks is quiet
    both = Noting(), NotingDecodes()
    worker, _ = sides(*both)
    assert worker.hooks.decode_steps
    worker.hooks.before("l", several)
    worker.hooks.before("l", single)
    assert [len(one.calls) for one in both] == [1, 2]
    hooks = worker.hooks
    worker.register({})
    assert worker.hooks is hooks
    assert not sides(Noting(), Noting())[0].hooks.decode_steps


class Suite(ConnectorSuite):
    """Engines with connectors over folders. Its tests are run elsewhere."""

    __test__ = False
    plugin = "multi"


def suite_of(folder, *names, plugin="multi"):
    made = Suite()
    made.folder, made.plugin = folder, plugin
    disks = [{"kv_connector": "disk", "options": {"folder": str(folder / name)}} for name in names]
    made.options = {"connectors": disks} if plugin == "multi" else disks[0]["options"]
    return made


def found(folder, name, prompt):
    """How many tokens of the prompt a disk alone has, all of them right."""
    engine = suite_of(folder, name, plugin="disk").engine()
    engine.run(request("alone", prompt))
    engine.check()
    engine.close()
    return engine.num_cached("alone")


def test_each_of_two_disks_gives_what_it_has_and_both_save(tmp_path):
    suite = suite_of(tmp_path, "near", "far")
    for seed, name in enumerate(("near", "far")):
        suite_of(tmp_path, name, plugin="disk").fill(suite.prompt(30, seed=seed))
    engine = suite.engine()
    engine.run(*(request(str(seed), suite.prompt(30, seed=seed)) for seed in range(3)))
    engine.check()
    assert [engine.num_cached(str(seed)) for seed in range(3)] == [28, 28, 0]
    counters = engine.engine.stats().connector_counters
    assert (counters["disk_0_hit_tokens"], counters["disk_1_hit_tokens"]) == (28, 28)
    assert {name: count for name, count in counters.items() if name.endswith("_blocks")} == {
        "disk_0_loaded_blocks": 7,
        "disk_1_loaded_blocks": 7,
        "disk_0_saved_blocks": 7,
        "disk_1_saved_blocks": 7,
    }
    engine.close()
    assert [found(tmp_path, name, suite.prompt(30, seed=2)) for name in ("near", "far")] == [28, 28]


def test_what_is_computed_from_blocks_that_did_not_arrive_is_saved_by_none(tmp_path):
    """A load that ends within a step would let the other connector save what that step computed."""
    suite = suite_of(tmp_path, "near", "far")
    suite_of(tmp_path, "near", plugin="disk").fill(suite.prompt(16))
    for path in (tmp_path / "near").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1])
    engine = suite.engine()
    engine.run(request("a", suite.prompt(40)))
    engine.check()
    engine.close()
    for name in ("near", "far"):
        assert found(tmp_path, name, suite.prompt(48)) == 40


@pytest.mark.parametrize("method", ["allocated", "build_message"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_of_one_that_raises_are_computed(tmp_path, method, ranks):
    suite = suite_of(tmp_path, "near", "far")
    layout = make_layout(ranks=ranks)
    suite_of(tmp_path, "near", plugin="disk").fill(suite.prompt(30), layout=layout, ranks=ranks)
    engine = suite.engine(layout, ranks=ranks)

    def fails(*arguments):
        raise RuntimeError("broken")

    setattr(engine.connector.inner._parts[0].connector, method, fails)
    engine.run(request("a", suite.prompt(30)), request("b", suite.prompt(20, seed=1)))
    engine.run(request("c", suite.prompt(30)))
    engine.check()
    assert not engine.connector.inner._ended
    engine.close()


def test_prefill_and_decode_apart_beside_a_tier(tmp_path):
    """Real agents: the decode engine reads what it lacks from the other one, or from its own tier."""
    pytest.importorskip("nixl")
    pairs = Pairs(tmp_path)
    pairs.plugin = "multi"
    tier = {"kv_connector": "offload", "options": {"size": 0.001}}
    pairs.options = {"connectors": [tier, {"kv_connector": "nixl", "options": pairs.options}]}
    giver, taker = pairs.engine(), pairs.engine()
    try:
        prompt = pairs.prompt(40)
        assert pairs.decode(taker, "first", prompt, pairs.prefill(giver, "first", prompt)) == 39
        assert counter(taker, "loaded_blocks") == 10
        pairs.rest(giver, taker)
        mine = pairs.prompt(40, seed=1)
        pairs.decode(taker, "second", mine, None)
        pairs.rest(taker)
        assert taker.engine.call("reset_prefix_cache", {})
        assert pairs.decode(taker, "third", mine, pairs.prefill(giver, "third", mine)) == 36
        assert counter(taker, "loaded_blocks") == 10, "it came from the tier, and the other engine heard of it"
        pairs.rest(giver, taker)
        assert not giver.held
    finally:
        pairs.close()


OFFLOAD = {"kv_connector": "offload", "options": {"size": 0.01}}


@pytest.mark.parametrize("settings", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.matrix)], ids=str)
def test_a_real_model_finds_its_prompts_in_a_tier_and_then_on_a_disk(tmp_path, settings):
    disk = {"kv_connector": "disk", "options": {"folder": str(tmp_path / "disk")}}
    prompts = [{"prompt_token_ids": [3 + (7 * i * (j + 1)) % 400 for i in range(60 + j)]} for j in range(3)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    tokens, cached, hits = [], [], []
    folder = str(make_checkpoint(tmp_path, "gemma2"))
    for _ in range(2):
        llm = LLM(
            model=folder,
            block_size=8,
            max_model_len=160,
            num_gpu_blocks_override=200,
            skip_tokenizer_init=True,
            num_threads=1,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [
                        {
                            "kv_connector": "OffloadingConnector",
                            "kv_role": "kv_both",
                            "kv_connector_extra_config": OFFLOAD["options"],
                        },
                        disk,
                    ]
                },
            },
            **settings,
        )
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([list(one.outputs[0].token_ids) for one in outputs])
            cached.append([one.num_cached_tokens for one in outputs])
            assert llm.reset_prefix_cache()
        metrics = {one.name: one.value for one in llm.get_metrics() if "connector" in one.name}
        names = ("offload_hit_tokens", "disk_loaded_blocks")
        hits.append([metrics.get(f"frame_kv_connector_{name}", 0) for name in names])
        llm.close()
    assert tokens[1:] == tokens[:1] * 3
    assert cached == [[0] * 3, [56] * 3, [56] * 3, [56] * 3]
    assert hits == [[168, 0], [0, 42 * settings.get("tensor_parallel_size", 1)]]


def test_options_that_are_wrong_are_one_sentence(tmp_path):
    folder = str(make_checkpoint(tmp_path, "llama"))
    huge = {"kv_connector": "offload", "options": {"size": 1 << 19}}
    cases = [
        ([], "option connectors of plugin 'multi' must have at least 1 item"),
        ([{"kv_connector": "disc"}], "no KV connector 'disc'; there are: decode-bench, disk"),
        ([{"kv_connector": "disk"}], "option folder of plugin 'disk' is missing"),
        ([{"kv_connector": "disk", "options": {"x": 1}}], "plugin 'disk' has no option 'x'; there are: folder"),
        ([{"kv_connector": "multi"}], "it cannot hold 'multi', which holds connectors itself"),
        ([{"kv_connector": "disk", "kv_role": "kv_none"}], "option connectors.0.kv_role of plugin 'multi' must be"),
        (
            [{"kv_connector": "disk", "engine_id": "x"}],
            "option connectors.0.engine_id of plugin 'multi' is unknown here",
        ),
        ([{"options": {}}], "option connectors.0.kv_connector of plugin 'multi' is missing"),
        ([huge], "KV connector 'multi', 'offload' in it: "),
    ]
    for connectors, text in cases:
        with pytest.raises((ConfigError, PluginError)) as caught:
            LLM(folder, kv_connector="multi", plugin={"multi": {"connectors": connectors}}, skip_tokenizer_init=True)
        assert text in str(caught.value), connectors
        assert "\n" not in str(caught.value)
    with pytest.raises((ConfigError, PluginError), match="option connectors of plugin 'multi' is missing"):
        LLM(folder, kv_connector="multi", skip_tokenizer_init=True)
