"""Slow masks hold up their own request alone, cost the requests that ask for them, and their memory is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.engine.grammar import constraints as constraints_module
from frame.core.engine.grammar.compiler import GrammarCompiler
from frame.core.interfaces.engine import EngineOutput
from frame.core.plugin_host.setups import grammar_setup
from frame.interfaces import Grammar, GrammarBackend, GrammarMatcher, SchedulerPolicy, StructuredOutputsParams
from frame.plugins.grammars.guidance import GuidanceBackend
from frame.plugins.schedulers.fair import FairPolicy
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.testing.engines import fake_engine, request
from frame.testing.fake_cache import VOCAB, expected_tokens, make_layout
from frame.testing.fake_executor import FakeExecutor, FakeWorkers
from frame.testing.setups import make_setup


class Matcher(GrammarMatcher):
    finished = False

    def __init__(self, grammar: FakeGrammar) -> None:
        self.grammar = grammar
        self.length = 0
        self.filling = False
        self.reason: str | None = None

    def advance(self, token_id: int) -> bool:
        assert not self.filling, "a token is taken while another thread fills the mask before it"
        self.length += 1
        return True

    @property
    def error(self) -> str | None:
        return self.reason


class FakeGrammar(Grammar):
    """Named as `KIND:NUMBER`: `slow` masks take a third of a second, those of `later` ones from the tenth token on."""

    num_bytes = 100

    def __init__(self, text: str) -> None:
        self.kind = text.split(":")[0]

    def matcher(self) -> Matcher:
        return Matcher(self)


class Backend(GrammarBackend):
    class vocabulary:
        size = VOCAB

    def __init__(self) -> None:
        pass

    def normalize(self, params: StructuredOutputsParams) -> str:
        return str(params.regex)

    def compile(self, text: str) -> FakeGrammar:
        return FakeGrammar(text)

    def fill_masks(self, matchers: Any, words: np.ndarray) -> None:
        for matcher in matchers:
            assert not matcher.filling, "two threads fill the mask of one output"
            matcher.filling = True
            kind = matcher.grammar.kind
            if kind == "slow" or (kind == "later" and matcher.length >= 10):
                time.sleep(0.3)
            if kind == "hard":
                matcher.reason = "too many states"
            if kind == "broken":
                raise RuntimeError("no mask")
            matcher.filling = False
        words[:] = -1


class Trial:
    def check(self, params: StructuredOutputsParams) -> str:
        return str(params.regex)

    def close(self) -> None:
        pass


class Run:
    """An engine and what its requests were answered, with the moment of each token."""

    def __init__(self, policy: type[SchedulerPolicy] = FirstComeFirstServedPolicy) -> None:
        config = from_flat({"max_num_seqs": 16, "max_num_batched_tokens": 64})
        executor = FakeExecutor(make_setup("executor", config=config, workers=FakeWorkers()))
        backend = Backend()
        compiler = GrammarCompiler(lambda: backend, Trial, cache_bytes=1 << 20)
        chosen = policy(make_setup("scheduler", config=config))
        self.engine: Engine = fake_engine(config, executor, chosen, make_layout(1000), compiler=compiler)
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.times: dict[str, list[float]] = {}
        self.asked: dict[str, Any] = {}

    def add(self, name: str, num_tokens: int, regex: str | None = None, owner: str = "") -> None:
        params = {} if regex is None else {"structured_outputs": StructuredOutputsParams(regex=regex)}
        self.asked[name] = request(name, [1, 2, 3, len(self.asked)], num_tokens, **params)
        self.asked[name].owner = owner
        self.outputs[name], self.times[name] = [], []
        self.engine.add(self.asked[name])

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id].append(output)
            self.times[output.request_id] += [time.monotonic()] * len(output.token_ids)

    def finish(self) -> None:
        while self.engine.has_unfinished():
            self.step()

    def ended(self, name: str) -> bool:
        return bool(self.outputs[name]) and self.outputs[name][-1].finish_reason is not None

    def check(self, *names: str) -> None:
        for name in names:
            one = self.asked[name]
            tokens = [token for output in self.outputs[name] for token in output.token_ids]
            assert tokens == expected_tokens(one.prompt_ids.tolist(), one.max_tokens, one.seed), name


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.engine.close()


def test_others_go_on_while_a_mask_is_filled(run: Run) -> None:
    for number in range(3):
        run.add(f"slow{number}", 8, f"slow:{number}")
    while not all(run.times[f"slow{number}"] for number in range(3)):
        run.step()
    run.add("quick", 60, "quick")
    run.add("plain", 60)
    while not (run.ended("plain") and run.ended("quick")):
        run.step()
    assert not any(run.ended(f"slow{number}") for number in range(3))
    for name in ("plain", "quick"):
        pauses = np.diff(run.times[name])
        assert pauses.max() < 0.25, "a token waited for a mask of another request"
    run.finish()
    run.check("plain", "quick", "slow0", "slow1", "slow2")


def test_nobody_gives_way_to_a_request_whose_mask_is_not_there() -> None:
    run = Run(FairPolicy)
    scheduler = run.engine.scheduler
    for number in range(16):
        run.add(f"a{number}", 60, owner="a")
    while not all(run.times[f"a{number}"] for number in range(16)):
        run.step()
    before = run.engine.stats().preemptions
    run.add("slow", 1, "slow:0", owner="b")
    while not scheduler.constraints._filler.num_ahead:
        run.step()
    for _ in range(8):  # the scheduler looks for a request that gives way every four steps
        run.step()
    assert scheduler.constraints._filler.num_ahead, "the mask came early: nothing is tested"
    preempted = run.engine.stats().preemptions
    while not run.ended("slow"):
        run.step()
    run.check("slow")
    run.engine.close()
    assert preempted == before


def test_no_mask_is_filled_while_a_token_before_it_is_on_its_way(run: Run) -> None:
    scheduler = run.engine.scheduler
    run.add("a", 8, "quick")
    while not run.engine._in_flight:
        run.engine._late += scheduler.constraints.admit()
        run.engine._launch()
    request = scheduler.lifecycle.requests["a"]
    scheduler.lifecycle.preempt(request)  # as for another request, or for one under suspicion
    assert request.num_unanswered
    assert scheduler.constraints.must_wait(request)
    assert not scheduler.constraints._filler.num_ahead
    run.finish()
    run.check("a")


def test_masks_of_several_owners_are_filled_in_turns(run: Run) -> None:
    for number in range(12):
        run.add(f"a{number}", 1, f"slow:{number}", owner="a")
    run.add("b", 1, "slow:b", owner="b")
    while not run.ended("b"):
        run.step()
    assert sum(run.ended(f"a{number}") for number in range(12)) <= 6


def test_a_grammar_that_becomes_slow_is_set_aside_and_loses_no_token(run: Run) -> None:
    for number in range(6):  # as many as another thread fills
        run.add(f"later{number}", 12, "later")
    run.add("plain", 80)
    run.finish()
    run.check("plain", *(f"later{number}" for number in range(6)))
    assert np.diff(run.times["plain"]).max() < 0.25
    assert run.engine.stats().preemptions >= 6


def test_what_no_mask_can_be_made_for_is_the_fault_of_its_request(run: Run) -> None:
    run.add("hard", 5, "hard")
    run.add("broken", 5, "broken")
    run.add("plain", 5)
    run.finish()
    run.check("plain")
    hard, broken = run.outputs["hard"][-1], run.outputs["broken"][-1]
    assert (hard.error, hard.fault) == ("structured_outputs: too many states", "request")
    assert (broken.finish_reason, broken.fault) == ("error", "engine")


def test_the_largest_grammar_in_use_gives_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints_module, "IN_USE_BYTES", 1 << 20)
    for number in range(4):
        run.add(f"quick{number}", 80, f"quick:{number}")
    while not all(run.times[f"quick{number}"] for number in range(4)):
        run.step()
    requests = run.engine.scheduler.lifecycle.requests
    requests["quick2"].grammar.grammar.num_bytes = 1 << 20
    run.finish()
    run.check("quick0", "quick1", "quick3")
    last = run.outputs["quick2"][-1]
    assert last.fault == "request"
    assert "its grammar takes about 1048576 bytes by now" in str(last.error)


def test_abandoned_and_closed_while_a_mask_is_filled(run: Run) -> None:
    run.add("slow", 3, "slow:0")
    while not run.engine.scheduler.constraints._filler.num_ahead:
        run.step()
    run.engine.abort(["slow"])
    run.add("plain", 3)
    run.finish()
    run.check("plain")
    assert run.outputs["slow"][-1].finish_reason == "abort"
    run.engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("masks")]


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


class Words:
    """A vocabulary of forty thousand words."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        draw = np.random.default_rng(1)
        letters = list("etaoinshrdlucmfwypvbgkjqxzETAOIN0123456789 ")
        texts = {letter.replace(" ", "Ġ"): None for letter in letters}
        while len(texts) < 40_000:
            texts["".join(draw.choice(letters, draw.integers(2, 9))).replace(" ", "Ġ")] = None
        made = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["</s>"])
        self.definition, self.size, self.eos_token_ids = made.to_str(), 40_001, [40_000]
        self.special_tokens: dict[str, int] = {}

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def follow(backend: GuidanceBackend, grammar: Grammar, steps: int, seed: int) -> None:
    """Writes a random output that the grammar allows."""
    draw, matcher = np.random.default_rng(seed), grammar.matcher()
    words = np.zeros((1, -(-backend.vocabulary.size // 32)), np.int32)
    for _ in range(steps):
        backend.fill_masks([matcher], words)
        allowed = np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little"))
        if matcher.error is not None or not len(allowed) or not matcher.advance(int(draw.choice(allowed))):
            return


def test_lexers_that_grow_with_use_stay_within_the_bytes_of_the_cache() -> None:
    backend = GuidanceBackend(grammar_setup(from_flat({}), Words()))
    compiler = GrammarCompiler(lambda: backend, Trial, cache_bytes=16 << 20)
    heavy = "([a-z]*[aeiou][a-z]{{9}}|[A-Za-z0-9 ]*[ets][A-Za-z0-9 ]{{7}}){{2,5}}q{}"

    def text(number: int) -> StructuredOutputsParams:
        return StructuredOutputsParams(regex=heavy.format(number))

    trial = compiler._take_trial()
    trial.check = lambda params: backend.normalize(params)  # type: ignore[method-assign]
    compiler._idle.put(trial)
    follow(backend, compiler.compile(text(0)).result(60), 20, 0)
    before = resident_bytes()
    for number in range(1, 40):
        grammar = compiler.compile(text(number)).result(60)
        fresh = grammar.num_bytes
        follow(backend, grammar, 20, number)
        assert grammar.num_bytes > fresh + (1 << 20), "what its lexer holds now is not counted"
    del grammar
    grown = resident_bytes() - before
    compiler.close()
    assert grown < 48 << 20, f"{grown >> 20} MiB are held after 40 regular expressions, 16 MiB may be kept"
