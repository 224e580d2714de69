"""The worker side of the mooncake connector: as that of push, but Mooncake writes the bytes to the other worker."""

from __future__ import annotations

from collections.abc import Sequence

from frame.interfaces import ConnectorWorkerSetup

from ..blocks.host_arena import HostArena
from ..push.carrier import Carrier
from ..push.worker import PushWorker
from .engine import MooncakeCarrier
from .options import MooncakeOptions


class MooncakeWorker(PushWorker):
    """See the module."""

    title = "mooncake"

    def __init__(self, setup: ConnectorWorkerSetup, options: MooncakeOptions) -> None:
        super().__init__(setup, options)
        self._means = (setup.address, options.protocol, options.device)

    def open_carrier(self, arenas: Sequence[HostArena]) -> tuple[Carrier, str]:
        carrier = MooncakeCarrier(arenas, *self._means)
        return carrier, carrier.session
