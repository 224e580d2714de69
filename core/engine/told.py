"""What the outputs of one request have reported so far, so that each fact is reported once. Knows no queue."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..interfaces.engine import EngineOutput


@dataclass(slots=True)
class Told:
    """Changed by its own methods only.

    `num_cached`: prompt tokens found in the cache, None until the request was first admitted at `scheduled`, in seconds
    of time.time. `plain`: the first answer has told that, and no grammar follows the tokens, so that a token that ends
    nothing is all there is to an answer. `num_prompt_logprobs`: prompt positions whose log-probabilities were told.
    """

    num_prompt_logprobs: int
    num_cached: int | None = None
    scheduled: float | None = None
    plain: bool = False
    _begun: bool = False

    def admit(self, num_cached: int) -> None:
        """Called when the request is admitted for the first time, with so many prompt tokens found in the cache."""
        self.num_cached, self.scheduled = num_cached, time.time()

    def begin(self, output: EngineOutput, *, constrained: bool) -> None:
        """Adds to the first output with a token what is reported once; `constrained`: the output follows a grammar."""
        if not self._begun:
            self._begun, self.plain = True, not constrained
            output.num_cached, output.scheduled = self.num_cached, self.scheduled

    def add_prompt(self, count: int) -> None:
        """Counts prompt positions whose log-probabilities were reported."""
        self.num_prompt_logprobs += count
