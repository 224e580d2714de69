"""The front's record of one request: the prompt, its output sequences, and how much of them was shown."""

from __future__ import annotations

from typing import Any

from ..interfaces.engine import EngineOutput, EngineRequest
from ..interfaces.sampling import RequestOutputKind, SamplingParams
from ..interfaces.step import LogprobRows
from ..interfaces.tokenizer import Tokenizer
from .logprobs import PromptLogprobs, append_rows, new_prompt_logprobs
from .outputs import CompletionOutput, RequestMetrics, RequestOutput, quick
from .prompts import ParsedPrompt
from .sequence import Sequence as OutputSequence


class RequestRecord:
    """One request: its echoed text and its ids, its output sequences, and how much of them the caller has seen.

    The engine runs `requests`, one for each of `params.n` outputs. Without a `tokenizer` outputs have ids only.
    """

    def __init__(
        self,
        request_id: str,
        text: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        requests: list[EngineRequest],
        tokenizer: Tokenizer | None,
        stream_interval: int,
    ) -> None:
        self.request_id = request_id
        self.text = text
        self.prompt_ids = prompt_ids
        self.params = params
        self.requests = requests
        self.sequences = [
            OutputSequence(index, request, prompt_ids, tokenizer) for index, request in enumerate(requests)
        ]
        self.metrics = RequestMetrics(requests[0].arrival)
        self.num_cached: int | None = None
        self.num_prompt_logprobs = 0  # positions whose log-probabilities have arrived
        self.kv_transfer: dict[str, Any] | None = None
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self.encoder: ParsedPrompt | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = new_prompt_logprobs(self.params.flat_logprobs)
        self._changed: dict[int, OutputSequence] = {}
        if len(self.sequences) > 1 or stream_interval != 1 or self._prompt_logprobs is not None:
            for sequence in self.sequences:
                sequence.takes_fast_path = False

    @property
    def finished(self) -> bool:
        for sequence in self.sequences:  # noqa: SIM110 # called for each token: a generator would double its cost
            if sequence.finish_reason is None:
                return False
        return True

    @property
    def _scores_prompt(self) -> bool:
        """Whether prompt log-probabilities, which come with the first sequence, are still missing."""
        if self._prompt_logprobs is None or self.sequences[0].finish_reason is not None:
            return False
        return self.num_prompt_logprobs < len(self.prompt_ids) - 1

    def ends(self) -> list[tuple[str, int]]:
        """How each finished sequence ended, and its tokens."""
        return [(str(sequence.finish_reason), len(sequence.token_ids)) for sequence in self.sequences]

    def push(self, sequence: OutputSequence, output: EngineOutput, now: float) -> bool:
        """Takes a step's output; returns whether the engine must end the sequence (a stop string)."""
        if output.token_ids:
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
                self.metrics.first_scheduled_time = output.scheduled
            self.metrics.last_token_time = now
        if output.num_cached is not None and self.num_cached is None:
            self.num_cached = output.num_cached
        if output.kv_transfer is not None:
            self.kv_transfer = output.kv_transfer
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(output.prompt_logprobs)
        self._changed[sequence.index] = sequence
        return sequence.push(output)

    def _add_prompt_logprobs(self, rows: LogprobRows) -> None:
        if self._prompt_logprobs is not None:
            decode = self._tokenizer.token_text if self._tokenizer is not None else None
            append_rows(self._prompt_logprobs, rows, decode)
        self.num_prompt_logprobs += len(rows.ranks)

    def end(self, sequence: OutputSequence) -> None:
        """Ends a sequence as aborted."""
        if sequence.finish_reason is None:
            sequence.finish("abort")
            self._changed[sequence.index] = sequence

    def take(self, now: float) -> RequestOutput | None:
        """The output that the caller gets now; None when its `output_kind` shows nothing yet."""
        sole = self.sequences[0]
        if sole.takes_fast_path and sole.finish_reason is None:
            self._changed.clear()
            return self._output(None, [sole.take_fast()], False)
        finished = self.finished
        kind = self.params.output_kind
        if finished:
            self.metrics.finished_time = now
        elif kind == RequestOutputKind.FINAL_ONLY or (kind == RequestOutputKind.DELTA and self._scores_prompt):
            return None
        due = list(self._changed.values())
        if self._stream_interval != 1:
            due = [one for one in due if one.due(self._stream_interval)]
        if not due:
            return None
        if len(due) > 1:
            due.sort(key=lambda sequence: sequence.index)
        shown = due if kind == RequestOutputKind.DELTA else self.sequences
        prompt_logprobs = self._prompt_logprobs
        if kind == RequestOutputKind.DELTA:
            self._prompt_logprobs = None  # reported once, with the first output
        output = self._output(prompt_logprobs, [sequence.take() for sequence in shown], finished)
        for sequence in due:
            del self._changed[sequence.index]
        return output

    def _output(
        self, prompt_logprobs: PromptLogprobs | None, outputs: list[CompletionOutput], finished: bool
    ) -> RequestOutput:
        made = quick(
            RequestOutput,
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=self.prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached,
            kv_transfer_params=self.kv_transfer,
        )
        if self.encoder is not None:
            made.encoder_prompt, made.encoder_prompt_token_ids = self.encoder.text, self.encoder.ids
        return made
