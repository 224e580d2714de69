"""One output sequence of a request: its ids, text and log-probabilities so far. Knows no other sequence."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

from ..interfaces.engine import EngineOutput, EngineRequest, Fault, FinishReason
from ..interfaces.sampling import RequestOutputKind
from ..interfaces.step import LogprobRows
from ..interfaces.tokenizer import Tokenizer
from .detokenizer import Detokenizer, make_detokenizer
from .logprobs import SampleLogprobs, append_rows, new_sample_logprobs
from .outputs import CompletionOutput, quick
from .stop import StopStrings


class Sequence:
    """The record of one engine request, from which its output is shown and a replay is built (`request`, `token_ids`).

    Without a `tokenizer` it has ids only.
    """

    def __init__(self, index: int, request: EngineRequest, prompt_ids: Ids[int], tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.fault: Fault = "engine"
        self._kind = params.output_kind
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self._stops: StopStrings | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = make_detokenizer(
                tokenizer,
                prompt_ids,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
                params.kept_special_token_ids or (),
            )
            if params.stop:
                self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        #: whether ids are only collected until the end
        self.quiet = (
            params.output_kind == RequestOutputKind.FINAL_ONLY
            and self._stops is None
            and params.logprobs is None
            and params.prompt_logprobs is None
        )
        #: whether a step's ids only need to be decoded (no stop strings, no log-probabilities); its record may switch
        #: this off
        self.takes_fast_path = (
            params.output_kind == RequestOutputKind.DELTA and self._stops is None and params.logprobs is None
        )
        self._num_decoded = 0
        self._num_sent = 0
        self._text: list[str] = []
        self._sent_text = ""
        self._logprobs: SampleLogprobs | None = None
        self._cumulative: float | None = None
        if params.logprobs is not None:
            self._logprobs, self._cumulative = new_sample_logprobs(params.flat_logprobs), 0.0

    def push(self, output: EngineOutput) -> bool:
        """Takes what a step added; returns whether a stop string has ended the sequence, so that the engine must."""
        before = len(self.token_ids)
        self.token_ids += output.token_ids
        reason = output.finish_reason
        stopped = False
        if self._stops is not None:
            stopped = self._read_until_stop(self._num_shown(reason))
        elif reason is None and self._kind != RequestOutputKind.FINAL_ONLY:
            self._read(len(self.token_ids))
        if self._logprobs is not None and output.logprobs is not None:
            self._add_logprobs(output.logprobs, len(self.token_ids) - before)
        if stopped:
            return reason is None
        if reason is not None:
            self.fault = output.fault
            self.finish(reason, output.stop_reason, output.error)
        return False

    def push_fast(self, token_ids: list[int]) -> None:
        """The fast path of `push`, for a sequence with `takes_fast_path` and a step that adds ids only."""
        self.token_ids += token_ids
        if self._detokenizer is not None:
            self._text.append(self._detokenizer.push(token_ids))
            self._num_decoded = len(self.token_ids)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """Ends the sequence and decodes the text that was held back."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        if self._detokenizer is None:
            return
        if self._stops is None:
            self._read(self._num_shown(reason))
        rest = self._detokenizer.flush()
        if self._stops is not None:
            shown, _ = self._stops.push(rest)
            rest = shown + self._stops.flush()
        self._text.append(rest)

    def due(self, interval: int) -> bool:
        """Whether an output is due: for the first tokens, after `interval` new ones, and at the end."""
        return (
            interval == 1
            or self.finish_reason is not None
            or self._num_sent == 0
            or len(self.token_ids) - self._num_sent >= interval
        )

    def take_fast(self) -> CompletionOutput:
        """The fast path of `take`, for a sequence with `takes_fast_path` that has not ended."""
        text, num_sent, self._num_sent = self._text, self._num_sent, len(self.token_ids)
        shown = text[0] if len(text) == 1 else "".join(text)
        text.clear()
        return quick(CompletionOutput, index=self.index, text=shown, token_ids=self.token_ids[num_sent:])

    def take(self) -> CompletionOutput:
        """The output by its `output_kind`: everything so far, or what is new since the last call."""
        text = "".join(self._text)
        self._text.clear()
        token_ids, logprobs = self.token_ids, self._logprobs
        num_sent, self._num_sent = self._num_sent, len(token_ids)
        if self._kind == RequestOutputKind.DELTA:
            token_ids = token_ids[num_sent:]
            if logprobs is not None:
                self._logprobs = new_sample_logprobs(self.request.params.flat_logprobs)
        else:
            text = self._sent_text = self._sent_text + text
            if self.finish_reason is None:
                token_ids = token_ids.copy()
                logprobs = None if logprobs is None else logprobs[:]
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self._cumulative,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            error=self.error,
            fault=self.fault,
        )

    def _num_shown(self, reason: FinishReason | None) -> int:
        """The number of tokens that become text: without a final stop or end-of-sequence token that is not shown."""
        num_tokens = len(self.token_ids)
        if reason != "stop" or not num_tokens or self.request.params.include_stop_str_in_output:
            return num_tokens
        last = self.token_ids[-1]
        special = self._tokenizer is not None and last in self._tokenizer.special_ids
        return num_tokens - 1 if special or last in self.request.eos_token_ids else num_tokens

    def _read(self, end: int) -> None:
        if self._detokenizer is not None and end > self._num_decoded:
            self._text.append(self._detokenizer.push(self.token_ids[self._num_decoded : end]))
            self._num_decoded = end

    def _read_until_stop(self, end: int) -> bool:
        """Reads token by token; at a stop string drops the tokens after it and ends the sequence."""
        detokenizer, stops = self._detokenizer, self._stops
        if detokenizer is None or stops is None:
            return False
        for position in range(self._num_decoded, end):
            text = detokenizer.push(self.token_ids[position : position + 1])
            self._num_decoded = position + 1
            if position < self.request.params.min_tokens:
                self._text.append(text)
                continue
            shown, match = stops.push(text)
            self._text.append(shown)
            if match is not None:
                del self.token_ids[position + 1 :]
                self.finish_reason, self.stop_reason = "stop", match
                return True
        return False

    def _add_logprobs(self, rows: LogprobRows, num_rows: int) -> None:
        decode: Any = self._tokenizer.token_text if self._tokenizer is not None else None
        total = append_rows(self._logprobs if self._logprobs is not None else [], rows, decode, num_rows)
        self._cumulative = (self._cumulative or 0.0) + total
