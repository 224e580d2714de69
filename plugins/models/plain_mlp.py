"""The feed-forward part without a gate."""

from __future__ import annotations

from torch import Tensor, nn

from frame.interfaces import Build

from .activations import plain_activation


class PlainMLP(nn.Module):
    """down(activation(up(x))); a rank's part of a sum unless it is to `reduce`."""

    def __init__(
        self,
        build: Build,
        names: tuple[str, str],
        inner_size: int,
        function: str,
        *,
        bias: bool = True,
        reduce: bool = True,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        size, (up, down) = build.config.hidden_size, names
        self.up = build.linear(up, size, inner_size, bias=bias, shard="column", transposed=transposed)
        self.down = build.linear(down, inner_size, size, bias=bias, shard="row", transposed=transposed, reduce=reduce)
        self.activation = plain_activation(build, function)

    def forward(self, normed: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        out: Tensor = self.down(self.activation(self.up(normed)))
        return out
