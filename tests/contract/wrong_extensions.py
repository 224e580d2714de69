"""Worker extensions that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frame.interfaces import WorkerExtension


class Silent(WorkerExtension):
    """Has no method."""

    def _private(self) -> None:
        return None


class Raw(WorkerExtension):
    """Answers with a tensor."""

    def weight(self) -> Tensor:
        return next(self.setup.model.parameters()).data


class Shrinking(WorkerExtension):
    """Changes the model by being there."""

    def __init__(self, setup: Any, options: Any = None) -> None:
        super().__init__(setup, options)
        with torch.no_grad():
            for parameter in setup.model.parameters():
                parameter.mul_(-0.5)

    def nothing(self) -> None:
        return None
