"""The contract of connectors with the tier in shared memory, and a disk behind it, which outlive their engine."""

from __future__ import annotations

import itertools
import threading
from typing import ClassVar

import pytest

from frame.core.interfaces.mesh import Placement
from frame.core.plugin_host.setups import mesh_of
from frame.plugins.connectors.offload import disk as offload_disk
from frame.testing import ConnectorSuite


@pytest.mark.matrix
class TestShared(ConnectorSuite):
    """Engines with names of their own."""

    plugin = "offload"
    options: ClassVar = {"size": 0.01, "shared": True, "keep": True}
    shares = True
    numbers = itertools.count()
    own = threading.local()  # engines are made in several threads at once

    @pytest.fixture(autouse=True)
    def _disk(self, _own_folder, request, monkeypatch):
        # other work on this machine must not make a disk look as if it did not answer
        monkeypatch.setattr(offload_disk, "LOOKUP_SECONDS", 60.0)
        # there the first step is to have the prompt, and who asks a disk has it one step later
        if "a_step_that_failed" not in request.node.name:
            self.options = {**self.options, "disk_folder": str(self.scratch("disk"))}

    def scheduler_side(self, config, layout):
        self.newest = self.own.name = f"engine-{next(self.numbers)}"
        return self.make(config=config, layout=layout, engine_id=self.own.name)

    def worker_side(self, config, layout, rank=0):
        placement = Placement(rank=rank, local_rank=rank, mesh=mesh_of(config))
        name = getattr(self.own, "name", self.newest)  # ranks have threads of their own
        return self.make(config=config, part="worker", layout=layout, placement=placement, engine_id=name)
