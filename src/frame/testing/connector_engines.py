"""What the suites of connectors share: engines with both sides of the connector, and how prompts pass between them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from frame.core.interfaces.connector import ConnectorScheduler, ConnectorWorker
from frame.core.interfaces.engine import EngineRequest
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.mesh import Placement
from frame.core.plugin_host.setups import mesh_of

from .connected_engine import ConnectedEngine
from .engines import request
from .fake_cache import VOCAB, make_layout
from .plugin_suite import PluginSuite, reason_or_none


class ConnectorEngines(PluginSuite):
    """See `ConnectorSuite`, which explains the attributes."""

    kind = "connector"
    stores: ClassVar[bool] = True
    produces: ClassVar[Mapping[str, Any]] = {}
    patience_seconds: ClassVar[float] = 20.0

    @property
    def shares(self) -> bool:
        """Whether an engine finds what another computed: `stores`, unless the provider's tag "stores" is "no"."""
        return self.stores and self.provider().tags.get("stores") != "no"

    def scheduler_side(self, config: Any, layout: KVLayout) -> ConnectorScheduler:
        """A new scheduler side."""
        made: ConnectorScheduler = self.make(config=config, layout=layout)
        return made

    def worker_side(self, config: Any, layout: KVLayout, rank: int = 0) -> ConnectorWorker:
        """A new worker side, of one of the ranks of the engine that `config` asks for, which may be one of several."""
        mesh, engine = mesh_of(config), config.data_parallel.data_parallel_rank or 0
        first = engine * mesh.engine_size if mesh.data > 1 else 0
        placement = Placement(rank=first + rank, local_rank=rank, mesh=mesh)
        made: ConnectorWorker = self.make(config=config, part="worker", layout=layout, placement=placement)
        return made

    def refuses(self, layout: KVLayout) -> str | None:
        """Why the connector cannot serve a layout, one line; None when it can."""
        config = self.config(kv_connector=self.name)
        try:
            self.scheduler_side(config, layout).close()
        except ValueError as error:  # a plugin's error is one, too
            return reason_or_none(str(error), "a connector's refusal")
        if any(group.keeps_states for group in layout.groups):
            worker = self.worker_side(config, layout)
            moves = worker.moves_states
            worker.close()
            return None if moves else "its worker side does not say that it moves states"
        return None

    def needs(self, layout: KVLayout) -> KVLayout:
        """The layout; skips the test where it has states, and the connector does not move them."""
        if any(group.keeps_states for group in layout.groups) and (reason := self.refuses(layout)):
            pytest.skip(reason)
        return layout

    def stored_files(self) -> list[Path]:
        """The files below the connector's `Path` options that hold something, in order."""
        files = sorted((self.folder / "scratch").rglob("*"))
        return [path for path in files if path.is_file() and path.stat().st_size]

    def damage(self) -> bool:
        """Truncates every stored file to half its size; returns False where the connector stores no files."""
        files = self.stored_files()
        for path in files:
            truncate(path)
        return bool(files)

    def damage_one(self, draw: random.Random) -> bool:
        """Truncates one stored file, of one rank; returns False where the connector stores no files."""
        files = self.stored_files()
        if files:
            truncate(draw.choice(files))
        return bool(files)

    def kill(self, engine: ConnectedEngine) -> None:
        """Ends an engine as if its process died: it takes no further step. Override where closing is more polite."""
        engine.close()

    def serves(self, engine: ConnectedEngine) -> None:
        """Called when an engine has computed what those that are made later may take from it while it lives."""

    def engine(
        self, layout: KVLayout | None = None, broken_steps: Collection[int] = (), *, ranks: int = 1, **settings: Any
    ) -> Any:
        """A new engine with new sides, on the same storage as the others of this test.

        With `late` the last of its ranks tells the ends of transfers so many steps late.
        """
        return ConnectedEngine(self, layout or make_layout(ranks=ranks), broken_steps, ranks=ranks, **settings)

    def prompt(self, length: int = 22, seed: int = 0) -> list[int]:
        """A prompt, the same for the same seed; shorter ones are its beginning."""
        return random.Random(seed).choices(range(VOCAB), k=96)[:length]

    def fill(self, *prompts: Sequence[int], layout: KVLayout | None = None, **settings: Any) -> None:
        """Computes prompts in an engine of their own, which then ends."""
        engine = self.engine(layout, **settings)
        engine.run(*(request(f"fill-{index}", prompt) for index, prompt in enumerate(prompts)))
        engine.check()
        engine.close()

    def given(self, giver: ConnectedEngine, name: str, prompt: Sequence[int]) -> EngineRequest:
        """Has `giver` compute a prompt, whose blocks it may hold from then on; the request of one that takes them."""
        produces = dict(self.produces) or json.loads(self.provider().tags.get("produces", "{}"))
        asked = request(name, prompt, 1 if produces else 12)
        asked.kv_transfer = produces or None
        giver.run(asked, until=lambda: giver.ended(name))
        self.serves(giver)
        taken = request(name, prompt)
        taken.kv_transfer = giver.outputs[name][-1].kv_transfer
        return taken

    def live(self, draw: random.Random, layout: KVLayout, *, ranks: int, late: int) -> None:
        """Random requests, aborts and failures, in engines that start and end on one storage."""
        for life in range(3):
            broken = {draw.randrange(1, 20)} if draw.random() < 0.5 else ()
            budget = draw.choice([5, 16, 64])
            engine = self.engine(layout, broken, ranks=ranks, late=late, max_num_batched_tokens=budget)
            gone: set[str] = set()
            for number in range(8):
                name = f"{life}-{number}"
                prompt = self.prompt(draw.randrange(1, 40), seed=draw.randrange(3))
                engine.add(request(name, prompt, draw.randrange(1, 9), seed=draw.randrange(2)))
                for _ in range(draw.randrange(4)):
                    engine.step()
                if draw.random() < 0.2:
                    gone.add(name)
                    engine.engine.abort([name])
            engine.run()
            failed = {name for name, outputs in engine.outputs.items() if outputs[-1].finish_reason == "error"}
            engine.check(*(set(engine.requests) - gone - failed))
            engine.close()

    def needs_storage(self) -> None:
        """Skips the test where the connector does not store blocks."""
        if not self.shares:
            pytest.skip("stores is False: another engine cannot find what one computed")


def truncate(path: Path) -> None:
    """Leaves half of a file."""
    os.truncate(path, path.stat().st_size // 2)
