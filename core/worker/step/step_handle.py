"""A launched step whose tokens are on their way to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...interfaces.platform import HostCopy, Streams
from ...interfaces.step import ExpertReport, StepPlan, StepResult, TransferReport

if TYPE_CHECKING:
    from ..pooling.pooling import PooledRows
    from ..sample.draws import PlainSampled, Sampled
    from ..sample.prompt_logprobs import PromptChunks
    from ..sample.sampler import Sampler


class PendingStep:
    """The handle that the engine waits on. `result` may be called once the step was sampled, any number of times."""

    def __init__(self, plan: StepPlan, transfer: TransferReport, sampler: Sampler) -> None:
        self.plan = plan
        self.prompt_logprobs: PromptChunks | None = None
        self.pooled: PooledRows | None = None
        self.wants_capture = False
        self.peers_busy = False
        self.experts: ExpertReport | None = None
        self._transfer = transfer
        self._sampler = sampler
        self._sampled: Sampled | PlainSampled | None = None
        self._copy: HostCopy | None = None
        self._result: StepResult | None = None

    @property
    def delivered(self) -> bool:
        """Whether the tokens have reached the host and its logits processors."""
        return self._result is not None

    def start_copy(self, sampled: Sampled | PlainSampled, streams: Streams) -> None:
        """Begins the copy to the host of everything that was sampled."""
        self._sampled = sampled
        self._copy = streams.copy_out(sampled.tensors())

    def ready(self) -> bool:
        if self._result is not None:
            return True
        return (self._copy is None or self._copy.ready()) and (self.pooled is None or self.pooled.ready())

    def results(self) -> list[StepResult]:
        """Waits for the step; the one result of this worker."""
        return [self.result()]

    def result(self) -> StepResult:
        """Waits for the step's tokens; the first call also hands them to logits processors that read them."""
        if self._result is None:
            self._result = self._copied()
        return self._result

    def _copied(self) -> StepResult:
        plan = self.plan
        result = StepResult(
            step=plan.step,
            token_ids=np.full((len(plan.slots), 1), -1, dtype=np.int32),
            num_tokens=plan.samples.astype(np.int32),
            transfer=self._transfer,
            wants_capture=self.wants_capture,
            peers_busy=self.peers_busy,
            experts=self.experts,
        )
        if self._copy is not None and self._sampled is not None:
            self._sampled.fill(result, self._copy.wait(), plan.samples)
            if self._sampler.takes_tokens:
                self._sampler.deliver(plan.slots[plan.samples], result.token_ids[plan.samples, 0])
        if self.prompt_logprobs is not None:
            result.prompt_logprobs = self.prompt_logprobs.rows()
        if self.pooled is not None:
            result.pooled, failed = self.pooled.rows()
            result.failed.update(failed)
        return result
