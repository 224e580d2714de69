"""Checks of connectors under engines of several ranks, and between engines of different shapes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from frame.core.plugin_host.registry import Registry

from .connector_engines import ConnectorEngines
from .engines import SMALL, drain, request, running, tokens_of
from .fake_cache import make_layout
from .thread_executor import with_threads
from .tiny import write_tiny

_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full and sliding": {"windows": (0, 6)},
    "latent beside full": {"windows": (0,), "latents": 2},
    "fewer heads than ranks": {"ranks": 1},
    "states": {"states": 4, "checkpoints": 8},
}
#: What differs between two engines of the same model.
_PAIRS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "one rank and two": ({"ranks": 1}, {"ranks": 2}),
    "two ranks and one": ({"ranks": 2}, {"ranks": 1}),
    "longer blocks": ({"block_size": 4}, {"block_size": 8}),
    "shorter blocks": ({"block_size": 8}, {"block_size": 4}),
    "other groups": ({"strides": (2,), "block_size": 2}, {"block_size": 4}),
    "latents on two ranks": ({"latents": 2, "windows": ()}, {"latents": 2, "windows": (), "ranks": 2}),
}


class ConnectorRanks(ConnectorEngines):
    """Part of `ConnectorSuite`."""

    @pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES.keys())
    def test_two_ranks_give_the_tokens_of_one(self, shape: Mapping[str, Any]) -> None:
        """What one rank reads spoils the tokens of all, as in a model that is divided."""
        layout = self.needs(make_layout(**{"ranks": 2, **shape}))
        prompts = [self.prompt(), self.prompt(40, seed=1), self.prompt(3, seed=2), self.prompt(16, seed=3)]
        self.fill(*prompts, layout=layout, ranks=2)
        engine = self.engine(layout, ranks=2)
        prompts[1] = self.prompt(60, seed=1)
        engine.run(*(request(str(index), prompt) for index, prompt in enumerate(prompts)))
        engine.check()
        if self.shares:
            assert engine.num_cached("1") == 40 // layout.grain * layout.grain
        engine.close()

    @pytest.mark.parametrize("seed", range(4))
    def test_what_one_rank_lacks_is_computed_on_all(self, seed: int) -> None:
        """Each rank's copy of a block is whole or not; what a rank computes from another's damage is never kept."""
        self.needs_storage()
        layout = make_layout(ranks=2)
        self.fill(self.prompt(30), layout=layout, ranks=2)
        if not self.damage_one(random.Random(seed)):
            pytest.skip("nothing was damaged: override damage_one() for what is stored elsewhere")
        for _ in range(3):
            engine = self.engine(layout, ranks=2)
            engine.run(request("longer", self.prompt(60)))
            engine.check()
            engine.close()

    @pytest.mark.parametrize("late", [1, 9])
    def test_a_completion_that_comes_late_leaks_nothing(self, late: int) -> None:
        """One of two ranks tells late that a load or a save has ended, also of requests that were aborted."""
        layout = make_layout(ranks=2)
        self.fill(self.prompt(40), self.prompt(30, seed=1), layout=layout, ranks=2)
        for steps in (0, 1, 2, 5):
            engine = self.engine(layout, ranks=2, late=late)
            taken = self.given(engine, "first", self.prompt(18, seed=2 + steps))
            for one in (request("goes", self.prompt(40)), request("stays", self.prompt(30, seed=1)), taken):
                one.request_id = f"{one.request_id}-{steps}"
                engine.add(one)
            for _ in range(steps):
                engine.step()
            engine.engine.abort([f"goes-{steps}"])
            engine.run()
            engine.check(f"stays-{steps}", taken.request_id)
            engine.close()

    @pytest.mark.parametrize(("first", "second"), _PAIRS.values(), ids=_PAIRS.keys())
    def test_engines_of_other_block_size_or_ranks_take_right_blocks_or_none(
        self, first: Mapping[str, Any], second: Mapping[str, Any]
    ) -> None:
        giver = self.engine(make_layout(**first), ranks=first.get("ranks", 1))
        taken = self.given(giver, "taken", self.prompt(41))
        taker = self.engine(make_layout(**second), ranks=second.get("ranks", 1))
        taker.run(taken, request("found", self.prompt(30) + self.prompt(10, seed=1)))
        taker.check()
        giver.run()
        giver.check()
        taker.close()
        giver.close()

    @pytest.mark.parametrize("giving", [0, 1])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_engines_that_share_experts_transfer_as_others_do(self, ranks: int, giving: int) -> None:
        """The workers of the second are not the first ones of the mesh; each engine has its own scheduler side."""
        layout = make_layout(ranks=ranks)
        settings: dict[str, Any] = {"ranks": ranks, "data_parallel_size": 2, "enable_expert_parallel": True}
        giver = self.engine(layout, data_parallel_rank=giving, **settings)
        taken = self.given(giver, "taken", self.prompt(40))
        if self.shares:
            giver.run()  # until its blocks are stored
        taker = self.engine(layout, data_parallel_rank=1 - giving, **settings)
        taker.run(taken)
        taker.check()
        if self.shares or taken.kv_transfer:
            assert taker.num_cached("taken") >= 39 // layout.grain * layout.grain
        giver.run()
        giver.check()
        taker.close()
        giver.close()

    def test_a_real_model_on_two_ranks_gives_the_same_tokens(self, tmp_path: Path) -> None:
        write_tiny(tmp_path, "LlamaForCausalLM")
        ranks = {"tensor_parallel_size": 2, "executor": "threads"}
        settings = {**SMALL, "model": str(tmp_path), "kv_connector": self.name, **ranks}
        registry = with_threads(Registry([*self.registry().offers], [*self.registry().failures]))
        answers = []
        for length in (60, 90):
            with running(self.config(**settings), registry) as engine:
                prompts = [[token + 3 for token in self.prompt(count)] for count in (60, length)]
                answers.append(drain(engine, [request(str(i), prompt) for i, prompt in enumerate(prompts)]))
        cold, again = answers
        assert tokens_of(again["0"]) == tokens_of(cold["0"]), "a reloaded prompt is continued otherwise"
        if self.shares:
            assert again["0"][0].num_cached, "nothing was found by a second engine"
