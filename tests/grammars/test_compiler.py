"""Equal constraints are compiled once, what is kept is bounded, and a trial costs nobody but its own grammar."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future

import pytest

from frame.core.config.flat import from_flat
from frame.core.engine.grammar.compiler import MAX_PENDING, NUM_COMPILERS, WORN_BYTES, GrammarCompiler, make_compiler
from frame.core.engine.grammar.progress import GrammarProgress, Pace
from frame.core.engine.grammar.trial import GrammarTrial
from frame.core.engine.request import QueueFullError
from frame.core.plugin_host.registry import PluginError, Registry
from frame.interfaces import Grammar, GrammarBackend, GrammarMatcher, StructuredOutputsParams


class FakeGrammar(Grammar):
    num_bytes = 100

    def __init__(self, text):
        self.text = text

    def matcher(self):
        return FakeMatcher()


class FakeMatcher(GrammarMatcher):
    finished = False

    def __init__(self):
        self.seen = []

    def advance(self, token_id):
        self.seen.append(token_id)
        return token_id != 9


class FakeBackend(GrammarBackend):
    def __init__(self):
        self.compiled = []

    def normalize(self, params):
        return params.regex

    def compile(self, text):
        self.compiled.append(text)
        return FakeGrammar(text)

    def fill_masks(self, matchers, words):
        words[:] = -1


class FakeTrial:
    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def check(self, params):
        self.gate.wait(60)
        if "(" in params.regex:
            raise ValueError("unclosed group")
        if "!" in params.regex:
            raise RuntimeError("no process")
        return params.regex

    def close(self):
        self.gate.set()
        self.closed = True


@pytest.fixture
def parts():
    backend, trial = FakeBackend(), FakeTrial()
    compiler = GrammarCompiler(lambda: backend, lambda: trial, cache_bytes=450)
    yield compiler, backend, trial
    compiler.close()
    assert trial.closed or not backend.compiled


def regex(text: str, **more) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text, **more)


def done(future: Future[Grammar]) -> Grammar:
    return future.result(10)


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_equal_constraints_share_one_grammar(parts):
    compiler, backend, _ = parts
    first = done(compiler.compile(regex("a")))
    assert done(compiler.compile(regex("a", start_after=[1]))) is first
    assert done(compiler.compile(regex("a", disable_any_whitespace=True))) is not first
    assert backend.compiled == ["a", "a"]


def test_the_least_recently_used_goes_first(parts):
    compiler, backend, _ = parts
    for text in "abcd":
        done(compiler.compile(regex(text)))
    until(lambda: len(compiler.kept_bytes) == 4)
    done(compiler.compile(regex("a")))
    done(compiler.compile(regex("e")))
    until(lambda: len(compiler.kept_bytes) == 4)
    for text in "acde":
        done(compiler.compile(regex(text)))
    assert backend.compiled == list("abcde")
    done(compiler.compile(regex("b")))
    assert backend.compiled == list("abcdeb")


def test_what_is_kept_stays_within_its_bytes(parts):
    compiler, _, _ = parts
    for number in range(300):
        done(compiler.compile(regex(f"a{number}")))
    until(lambda: len(compiler.kept_bytes) <= 4)


def test_a_refusal_that_is_kept_holds_nothing_of_its_constraint(parts):
    compiler, _, _ = parts
    error = compiler.compile(regex("(")).exception(10)
    assert str(error) == "unclosed group"
    until(lambda: error.__traceback__ is error.__context__ is error.__cause__ is None)


def test_a_grammar_that_grew_is_counted_and_at_last_compiled_anew(parts):
    compiler, backend, _ = parts
    grown = done(compiler.compile(regex("a")))
    for text in "bcd":
        done(compiler.compile(regex(text)))
    until(lambda: len(compiler.kept_bytes) == 4)
    done(compiler.compile(regex("a")))  # so that it goes last
    grown.num_bytes = 330
    assert sum(compiler.kept_bytes.values()) == 630
    done(compiler.compile(regex("e")))
    until(lambda: len(compiler.kept_bytes) == 2)
    assert sum(compiler.kept_bytes.values()) == 430
    assert done(compiler.compile(regex("a"))) is grown
    grown.num_bytes = WORN_BYTES + 1
    assert done(compiler.compile(regex("a"))) is not grown
    assert backend.compiled == list("abcdea")


def test_refusals_are_kept_and_accidents_are_not(parts):
    compiler, _, _ = parts
    future = compiler.compile(regex("("))
    with pytest.raises(ValueError, match="unclosed group"):
        done(future)
    until(lambda: len(compiler.kept_bytes) == 0)  # one refusal is larger than this cache
    accident = compiler.compile(regex("!"))
    with pytest.raises(RuntimeError):
        done(accident)
    until(lambda: compiler.compile(regex("!")) is not accident)


def test_too_many_different_grammars_are_refused(parts):
    compiler, _, trial = parts
    waiting = hold_up(compiler, trial)
    waiting += [compiler.compile(regex(f"a{number}")) for number in range(MAX_PENDING)]
    assert compiler.compile(regex("a3")) is waiting[NUM_COMPILERS + 3]
    with pytest.raises(QueueFullError, match="256 grammars wait to be compiled"):
        compiler.compile(regex("one more"))
    waiting.append(compiler.compile(regex("one more"), owner="another"))
    with pytest.raises(QueueFullError):
        compiler.compile(regex("one more"))  # to wait for another owner's grammar takes a place, too
    trial.gate.set()
    for future in waiting:
        done(future)


def test_owners_share_the_room_for_grammars_that_wait(parts, monkeypatch):
    monkeypatch.setattr("frame.core.engine.grammar.compiler.MAX_PENDING", 8)
    compiler, _, trial = parts
    waiting = hold_up(compiler, trial)
    counts = {}
    for owner in [f"owner{number}" for number in range(12)]:
        for number in range(20):
            with contextlib.suppress(QueueFullError):
                waiting.append(compiler.compile(regex(f"{owner} {number}"), owner=owner))
                counts[owner] = number + 1
    assert list(counts.values()) == [8, 4, 2, 2, 1, 1, 1, 1]  # 8 divided by the owners that wait
    trial.gate.set()
    for future in waiting:
        done(future)


def hold_up(compiler, trial):
    """Keeps the compiler's threads busy until the trial's gate opens."""
    trial.gate.clear()
    busy = [compiler.compile(regex(f"busy{number}")) for number in range(NUM_COMPILERS)]
    while compiler._threads._lines:
        time.sleep(0.001)
    return busy


def test_owners_take_turns(parts):
    compiler, backend, trial = parts
    futures = hold_up(compiler, trial)
    futures += [compiler.compile(regex(f"a{number}"), owner="a") for number in range(40)]
    futures += [compiler.compile(regex(f"b{number}"), owner="b") for number in range(2)]
    futures.append(compiler.compile(regex("a30"), owner="c"))
    assert futures[-1] is futures[NUM_COMPILERS + 30]
    trial.gate.set()
    for future in futures:
        done(future)
    first = [text for text in backend.compiled if not text.startswith("busy")][:8]
    assert {"b0", "b1", "a30"} <= set(first)
    assert backend.compiled.count("a30") == 1


def test_closing_cancels_what_waits(parts):
    compiler, _, trial = parts
    hold_up(compiler, trial)
    waiting = compiler.compile(regex("a"), owner="a")
    compiler.close()
    assert waiting.cancelled()


def test_a_child_that_is_made_while_the_compiler_closes_ends_too():
    trial, begun, gate = FakeTrial(), threading.Event(), threading.Event()

    def make():
        begun.set()
        gate.wait(60)
        return trial

    compiler = GrammarCompiler(FakeBackend, make, cache_bytes=450)
    compiler.compile(regex("a"))
    begun.wait(60)
    threading.Timer(0.1, gate.set).start()
    compiler.close()
    assert trial.closed


def test_progress_begins_after_the_ids_that_end_reasoning():
    progress = GrammarProgress(FakeGrammar("a"), Pace(), [5, 6], [9, 5])
    matcher = progress.matcher
    assert progress.advance(5)
    assert not progress.begun
    assert progress.advance(6)
    assert progress.begun
    assert progress.advance(7)
    assert not progress.advance(9)
    assert matcher.seen == [7, 9]
    assert GrammarProgress(FakeGrammar("a"), Pace(), [], [1, 2]).begun


def test_a_backend_asked_for_by_name_must_be_there():
    registry = Registry.load()
    with pytest.raises(PluginError, match="no grammar backend 'xgrammar'; there are: guidance"):
        make_compiler(from_flat({"structured_outputs_backend": "xgrammar"}), registry, None)
    compiler = make_compiler(from_flat({"skip_tokenizer_init": True}), registry, None)
    refusal = compiler.compile(regex("a")).exception(10)
    compiler.close()
    assert isinstance(refusal, ValueError)
    assert str(refusal) == "structured_outputs cannot be served: the engine has no tokenizer"


@pytest.fixture(scope="module")
def trial():
    config = from_flat({"grammar_compile_seconds": 1.0, "grammar_compile_bytes": 1 << 27})
    made = GrammarTrial(config, Registry.load().choices(config))
    yield made
    made.close()


#: Takes seconds, and more memory from one to the next.
SLOW = {"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(100)]}


def test_a_grammar_that_takes_long_is_refused():
    config = from_flat({"grammar_compile_seconds": 0.2, "grammar_compile_bytes": 1 << 32})
    trial = GrammarTrial(config, Registry.load().choices(config))
    with pytest.raises(ValueError, match=r"takes more than 0\.2 seconds to compile \(grammar_compile_seconds\)"):
        trial.check(StructuredOutputsParams(json=SLOW))
    trial.close()


def test_a_trial_survives_what_it_tries(trial):
    """A crash, a hang and a hunger for memory are refused; in between honest grammars pass."""
    chain = "\n".join(["start: r0", *(f"r{number}: r{number + 1}" for number in range(4000)), 'r4000: "a"'])
    cases = [
        ({"grammar": chain}, r"nests too deeply, or takes more than|\(grammar_compile_seconds\)"),
        # on a quick processor it has taken the memory before the time
        ({"json": SLOW}, r"takes more than (1 seconds to compile|134217728 bytes of memory)"),
        ({"regex": "(("}, "unclosed group"),
    ]
    for constraint, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            trial.check(StructuredOutputsParams(**constraint))
        assert len(str(caught.value)) < 700
        assert "lark_grammar" in trial.check(StructuredOutputsParams(choice=["a"]))
