"""The contract of worker extensions: names of their own, plain answers of every rank, and no change by being there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from frame.core.engine.engine import Engine
from frame.core.interfaces.extension import WorkerExtension
from frame.core.interfaces.wire import decode, encode
from frame.core.plugin_host.registry import Registry

from .engines import SMALL, greedy, prompts, running
from .plugin_suite import PluginSuite
from .thread_executor import with_threads
from .tiny import write_tiny

_RANKS = 2


class WorkerExtensionSuite(PluginSuite):
    """The contract of `frame.interfaces.WorkerExtension`.

        class TestMine(WorkerExtensionSuite):
            plugin = "mine"                              # or target = "package.module:Class"
            tags = {"calls": '{"norm": {"power": 2}}'}   # with a target: what its methods may be called with

    The provider's tag "calls" (JSON) maps methods to keyword arguments. Calls go to two tensor ranks of a tiny model.
    """

    kind = "extension"

    def calls(self) -> Mapping[str, dict[str, Any]]:
        """Method → keyword arguments; skips where the tag says none."""
        if not (tag := self.provider().tags.get("calls")):
            pytest.skip('the provider has no tag "calls"')
        found: Mapping[str, dict[str, Any]] = json.loads(tag)
        return found

    def engine(self, *, with_it: bool = True, ranks: int = _RANKS) -> Any:
        """A context with an engine of a tiny model over so many tensor ranks."""
        folder = self.scratch("model")
        if not (folder / "config.json").exists():
            write_tiny(folder, "LlamaForCausalLM")
        named = {"worker_extension": self.name} if with_it else {}
        executor = {"executor": "threads", "tensor_parallel_size": ranks, "platform": "cpu"}
        config = self.config(model=str(folder), **SMALL, **executor, **named)
        registry = self.registry()
        return running(config, with_threads(Registry([*registry.offers], [*registry.failures])))

    def answers(self, engine: Engine, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """What every worker answers, by rank."""
        return list(engine.call("worker", {"method": method, **arguments}))

    def test_its_methods_can_be_called_by_names_of_their_own(self) -> None:
        kind = self.found()
        assert issubclass(kind, WorkerExtension), f"{kind.__name__} does not derive from WorkerExtension"
        with self.engine() as engine:
            known = set(self.answers(engine, "run", {"function": lambda worker: sorted(worker._extension.methods)})[0])
        assert known, f"{kind.__name__} has no public method"
        if unknown := sorted(json.loads(self.provider().tags.get("calls", "{}")).keys() - known):
            pytest.fail(f"the tag calls {', '.join(unknown)}; there are: {', '.join(sorted(known))}")

    def test_every_rank_answers_in_plain_data(self) -> None:
        calls = self.calls()
        with self.engine() as engine:
            for method, arguments in calls.items():
                answers = self.answers(engine, method, arguments)
                assert len(answers) == _RANKS, f"{method}: {len(answers)} answers of {_RANKS} ranks"
                for answer in answers:
                    try:
                        decode(encode(answer), Any)
                    except (TypeError, ValueError) as error:
                        pytest.fail(f"{method} answers {answer!r:.100}, which cannot leave a worker process: {error}")
            engine.check()

    def test_unknown_arguments_fail_the_call_alone(self) -> None:
        with self.engine(ranks=1) as engine:
            for method in self.calls():
                with pytest.raises((TypeError, ValueError)):
                    self.answers(engine, method, {"no_such_argument": 1})
            assert greedy(engine, prompts(engine.info.vocab_size)[:1])

    def test_outputs_are_those_of_an_engine_without_it(self) -> None:
        with self.engine(with_it=False) as engine:
            given = prompts(engine.info.vocab_size)
            alone = greedy(engine, given)
        with self.engine() as engine:
            assert greedy(engine, given) == alone, "an extension that nobody calls changes outputs"
