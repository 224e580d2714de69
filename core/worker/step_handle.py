"""A launched step whose tokens are on their way to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..interfaces.platform import HostCopy, Streams
from ..interfaces.step import StepPlan, StepResult, TransferReport

if TYPE_CHECKING:
    from .prompt_logprobs import PromptChunks
    from .sampled import Sampled
    from .sampler import Sampler

NOT_FINITE = "the model produced logits that are not finite"
NO_CHOICE = (
    "no token is left: grammar, allowed_token_ids, bad_words, logit_bias, processors and min_tokens forbid them all"
)


class PendingStep:
    """The handle that the engine waits on. `result` may be called once the step was sampled, any number of times."""

    def __init__(self, plan: StepPlan, transfer: TransferReport, sampler: Sampler) -> None:
        self.plan = plan
        self.prompt_logprobs: PromptChunks | None = None
        self._transfer = transfer
        self._sampler = sampler
        self._sampled: Sampled | None = None
        self._copy: HostCopy | None = None
        self._result: StepResult | None = None

    @property
    def delivered(self) -> bool:
        """Whether the tokens have reached the host and whoever there needs them."""
        return self._result is not None

    def start_copy(self, sampled: Sampled, streams: Streams) -> None:
        """Begins the copy to the host of everything that was sampled."""
        self._sampled = sampled
        self._copy = streams.copy_out(sampled.tensors())

    def ready(self) -> bool:
        return self._result is not None or self._copy is None or self._copy.ready()

    def deliver(self) -> None:
        """Waits for the tokens and hands them to host-side logits processors, once."""
        if self._result is not None:
            return
        batch, plan = len(self.plan.slots), self.plan
        result = StepResult(
            step=plan.step,
            token_ids=np.full((batch, 1), -1, dtype=np.int32),
            num_tokens=np.zeros(batch, dtype=np.int32),
            transfer=self._transfer,
        )
        if self._copy is not None and self._sampled is not None:
            arrays = self._copy.wait()
            rows = np.flatnonzero(plan.samples)
            result.token_ids[rows, 0] = arrays["token_ids"]
            result.num_tokens[rows] = 1
            result.logprobs = self._sampled.logprob_rows(arrays, rows)
            for index in np.flatnonzero(~np.isfinite(arrays["drawn"])).tolist():
                result.failed[int(rows[index])] = NO_CHOICE if np.isneginf(arrays["drawn"][index]) else NOT_FINITE
            self._sampler.deliver(plan.slots[rows], arrays["token_ids"])
        if self.prompt_logprobs is not None:
            result.prompt_logprobs = self.prompt_logprobs.rows()
        self._result = result

    def result(self) -> StepResult:
        """Waits for the step and returns what it produced."""
        self.deliver()
        if self._result is None:
            raise RuntimeError("the step was not delivered")
        return self._result
