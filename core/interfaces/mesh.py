"""How the workers of an engine divide its model, and the place of one worker among them."""

from __future__ import annotations

import msgspec


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the parallel axes; rank = (data rank * `pipeline` + stage) * `tensor` + tensor rank."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Workers of all axes together."""
        return self.data * self.pipeline * self.tensor


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a mesh: its rank, and its place among the workers of its machine, which is the device's index."""

    rank: int = 0
    local_rank: int = 0
    mesh: Mesh = Mesh()
