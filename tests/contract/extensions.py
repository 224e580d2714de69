"""A worker extension: what a training loop asks of the workers of an engine between its rounds."""

import torch

from frame.interfaces import WorkerExtension


class WeightTools(WorkerExtension):
    """Looks at weights, and replaces them."""

    def largest(self, prefix: str = "") -> float:
        """The largest absolute value of this rank's parameters whose names in the model begin with `prefix`."""
        parameters = self.setup.model.named_parameters()
        return max((one.abs().max().item() for name, one in parameters if name.startswith(prefix)), default=0.0)

    def fill(self, name: str, shape: list[int], value: float) -> None:
        """Fills a tensor of the checkpoint, of which each rank takes its part; a trainer would broadcast it here."""
        self.setup.model.load([(name, torch.full(shape, value, device=self.setup.device))])
