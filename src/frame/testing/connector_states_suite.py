"""Checks of connectors for layers that keep a running state: copies of it stand for prefixes, and travel as blocks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from .connector_engines import ConnectorEngines
from .engines import request
from .fake_cache import make_layout

#: Layouts with states.
STATES: Mapping[str, Mapping[str, Any]] = {
    "states": {"states": 4, "checkpoints": 8},
    "states alone": {"windows": (), "states": 4, "checkpoints": 8},
    "states beside windows": {"windows": (0, 6), "strides": (1, 2), "states": 4, "checkpoints": 8},
}


class ConnectorStates(ConnectorEngines):
    """Part of `ConnectorSuite`; skipped for connectors that refuse states."""

    @pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())
    def test_a_state_or_block_that_is_damaged_is_computed_again(self, shape: Mapping[str, Any]) -> None:
        """One of what is stored: of a prompt whose state is lost its blocks are of no use, nor a state without them."""
        self.needs_storage()
        layout = self.needs(make_layout(**shape))
        self.fill(self.prompt(30), layout=layout, max_num_batched_tokens=layout.grain)
        if not self.damage_one(random.Random(1)):
            pytest.skip("nothing was damaged: override damage_one() for what is stored elsewhere")
        for _ in range(2):
            engine = self.engine(layout)
            # each goes on from another state
            engine.run(*(request(f"of {length}", self.prompt(length)) for length in range(6, 36, 4)))
            engine.check()
            engine.close()

    @pytest.mark.parametrize("chunk", [8, 64])
    def test_a_state_is_stored_with_the_prefix_that_it_stands_for(self, chunk: int) -> None:
        """It is overwritten in place while its request goes on: a prompt finds that of its own beginning, or none."""
        layout = self.needs(make_layout(**STATES["states"]))
        self.fill(self.prompt(43), layout=layout, max_num_batched_tokens=chunk)
        engine = self.engine(layout, max_num_batched_tokens=chunk)
        for length in (43, 20, 9, 30, 50):
            engine.run(request(f"of {length}", self.prompt(length)))
            engine.check()
        if self.shares:
            assert engine.num_cached("of 43") > 0, "another engine computed this prompt, and no state of it was found"
        engine.close()

    @pytest.mark.parametrize(("seed", "ranks"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)])
    def test_random_lives_with_states(self, seed: int, ranks: int) -> None:
        """As `test_random_lives`, where layers keep states too, or nothing else."""
        draw = random.Random(seed)
        windows, kept = draw.choice([(), (0,), (0, 6)]), draw.choice([2, 8])
        layout = make_layout(80 * max(1, len(windows)), windows=windows, states=4, checkpoints=kept, ranks=ranks)
        self.live(draw, self.needs(layout), late=seed % 3 if ranks > 1 else 0, ranks=ranks)
