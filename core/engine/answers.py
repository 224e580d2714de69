"""Applies the result of a step to its requests: new tokens, ends, failures, transfers. Plans nothing."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..interfaces.engine import EngineOutput
from ..interfaces.step import LogprobRows, StepResult, TransferReport
from .lifecycle import Lifecycle
from .request import Request, RequestState
from .schedule.planned_step import LaunchedStep

LOAD_ERROR = "KV blocks of the request could not be loaded (kv_load_failure_policy is fail)"


class Answers:
    """Applies results in the order of their steps."""

    def __init__(self, lifecycle: Lifecycle, *, fail_on_load: bool) -> None:
        self._lifecycle = lifecycle
        self._fail_on_load = fail_on_load
        self.generated_tokens = 0

    def accept(self, step: LaunchedStep, result: StepResult) -> list[EngineOutput]:
        """Returns the outputs of all rows whose requests are unfinished."""
        plan, kv = step.plan, self._lifecycle.kv
        if not len(plan.slots):
            return []
        verified = result.num_drafts is not None
        blocks = ((plan.num_computed + plan.num_scheduled) // kv.block_size).tolist()
        firsts = result.token_ids[:, 0].tolist()
        rare = verified or bool(result.logprobs or result.prompt_logprobs or result.failed)
        plain = not rare and np.count_nonzero(result.num_tokens) == np.count_nonzero(plan.samples) == len(firsts)
        finished = RequestState.FINISHED
        outputs: list[EngineOutput] = []
        for row, (request, token, full) in enumerate(zip(step.requests, firsts, blocks, strict=True)):
            if request is None or request.state is finished:
                continue
            if request.batch is None:
                request.num_unanswered -= 1
            else:
                if request.transfer.unconfirmed:
                    request.transfer.await_step(False)
                # of a row with drafts `_append` publishes what those that hold have filled
                if full > request.cache.num_published and not (verified and plan.samples[row]):
                    kv.publish(request, full * kv.block_size)
            # most rows of most steps: one more token, after which the request goes on
            if plain and request.reported.plain and token not in request.stop_ids:
                known = request.token_ids
                if len(known) + 1 < request.max_len:
                    known.append(token)
                    self.generated_tokens += 1
                    outputs.append(EngineOutput(request_id=request.request_id, token_ids=[token]))
                    continue
            tokens = [token] if plain else result.token_ids[row, : result.num_tokens[row]].tolist()
            if (output := self._accept_row(step, row, result, request, tokens, rare=rare)) is not None:
                outputs.append(output)
        return outputs

    def _accept_row(
        self, step: LaunchedStep, row: int, result: StepResult, request: Request, tokens: list[int], *, rare: bool
    ) -> EngineOutput | None:
        """The output of one row, if it has any; with `rare` it may have failed, verify drafts, or bring logprobs."""
        if rare and row in result.failed:
            return self._fail(request, result.failed[row])
        if request.pools:
            return self._end_pooling(request, step, row, result)
        output = None
        if step.plan.samples[row]:
            if not tokens:
                return self._fail(request, "the step returned no token for the request")
            output = self._append(request, tokens)
            if result.num_drafts is not None:
                output.num_drafts, output.num_accepted = int(result.num_drafts[row]), len(tokens) - 1
        return self._add_logprobs(output, request, step, row, result) if rare else output

    def _append(self, request: Request, tokens: list[int]) -> EngineOutput:
        """Adds tokens up to the first that ends the output; all that are known before the last are computed."""
        ends, length = False, len(request.token_ids)
        for index, token in enumerate(tokens, 1):
            ends = token in request.stop_ids and length + index >= request.min_len
            if ends:
                tokens = tokens[:index]
                break
        *before, token = tokens
        request.token_ids.extend(before)
        if request.batch is not None:
            self._lifecycle.kv.publish(request, len(request.token_ids))
        if request.grammar is not None and not ends and not request.grammar.advance(token):
            cause = request.grammar.matcher.error
            wrong = f"token {token} does not continue the output"
            failed = self._fail(request, f"structured_outputs: {cause or wrong}")
            failed.fault = "engine" if cause is None else "request"
            return failed
        request.token_ids.append(token)
        self.generated_tokens += len(tokens)
        stops = ends or (request.grammar is not None and request.grammar.finished)
        if stops or len(request.token_ids) >= request.max_len:
            reason = token if ends and token not in request.eos_ids else None
            output = self._lifecycle.finish(request, "stop" if stops else "length", stop_reason=reason)
            output.token_ids = tokens
        else:
            output = EngineOutput(request_id=request.request_id, token_ids=tokens)
        request.reported.begin(output, constrained=request.grammar is not None)
        return output

    def _end_pooling(self, request: Request, step: LaunchedStep, row: int, result: StepResult) -> EngineOutput | None:
        """The answer of a request whose prompt ends with this step; None before."""
        if step.plan.num_computed[row] + step.plan.num_scheduled[row] < request.prompt_len:
            return None
        pooled = result.pooled.get(row)
        if pooled is None:
            return self._fail(request, "the step returned no pooled row for the request")
        output = self._lifecycle.finish(request, "stop")
        output.pooled, output.num_cached = pooled, request.reported.num_cached
        return output

    def _fail(self, request: Request, error: str) -> EngineOutput:
        # whatever made the row fail may be in its blocks too
        self._lifecycle.kv.withdraw_request(request)
        return self._lifecycle.finish(request, "error", error=error)

    def _add_logprobs(
        self, output: EngineOutput | None, request: Request, step: LaunchedStep, row: int, result: StepResult
    ) -> EngineOutput | None:
        prompt = result.prompt_logprobs.get(row)
        if prompt is not None:
            # a prefill that was repeated after a preemption brings again what the front has
            start = int(step.plan.num_computed[row])
            prompt = rows_of(prompt, slice(max(0, request.reported.num_prompt_logprobs - start), None))
            request.reported.add_prompt(len(prompt.ranks))
            if output is None and len(prompt.ranks):
                output = EngineOutput(request_id=request.request_id)
            if output is not None:
                output.prompt_logprobs = prompt
        if output is not None:
            rows = result.logprobs.get(row)
            output.logprobs = None if rows is None else rows_of(rows, slice(len(output.token_ids)))
        return output

    def fail_step(self, step: LaunchedStep, error: str, spared: Collection[Request] = ()) -> list[EngineOutput]:
        """A launched step raised: its requests end unless `spared`; spared and later ones are computed again.

        What the connector was to load for them is computed, too: it may be the connector that raised. Later ones may
        have read its blocks, unless it was rolled back, and what it published withdrawn, before they were planned.
        """
        lifecycle, number, later = self._lifecycle, step.plan.step, list[LaunchedStep]()
        if step.plan.copies or step.publications or any(request is not None for request in step.requests):
            later = [one for one in lifecycle.launched.values() if one.plan.step > number]
        for launched in (step, *later):
            lifecycle.kv.withdraw(launched.publications)
            launched.publications.clear()
        outputs = []
        for request in step.requests:
            if request is None or request.state is RequestState.FINISHED:
                continue
            if request in spared:
                if request.transfer.unconfirmed:
                    request.transfer.give_up()
                lifecycle.roll_back(request, number)
            else:
                outputs.append(lifecycle.finish(request, "error", error=error))
        for request in step.loads:
            if request.transfer.loading:
                lifecycle.abandon(request)
        for launched in later:
            for request in launched.requests:
                if request is not None and request.state is not RequestState.FINISHED:
                    lifecycle.roll_back(request, number)
        return outputs

    def apply_transfer(self, report: TransferReport, step: LaunchedStep) -> list[EngineOutput]:
        """Ends loads and saves. Must be called before `accept` of the same `step`, some of whose rows it may drop."""
        lifecycle = self._lifecycle
        released = lifecycle.transfers.report(report, step.plan)
        outputs = []
        if report.failed_blocks and (bad := lifecycle.transfers.failed_blocks(report)):
            outputs = self._lose_blocks(bad, step)
        for request_id in report.given_up:
            if (request := lifecycle.loading.get(request_id)) is not None:
                if self._fail_on_load and request.state is not RequestState.FINISHED:
                    outputs.append(lifecycle.finish(request, "error", error=LOAD_ERROR))
                lifecycle.abandon(request)
            lifecycle.prolong(request_id)
        for request_id in report.received:
            request = lifecycle.loading.get(request_id) or lifecycle.abandoned.get(request_id)
            if request is not None:
                outputs += self._end_load(request)
        for request_id in (*report.sent, *released):
            lifecycle.sent(request_id)
        return outputs

    def _end_load(self, request: Request) -> list[EngineOutput]:
        lifecycle, good = self._lifecycle, request.transfer.take_losses()
        outputs = []
        if request.state is not RequestState.FINISHED:
            if good is None:
                lifecycle.kv.publish(request, request.transfer.num_loaded)
                lifecycle.kv.note_state(request, request.transfer.num_loaded)
            elif self._fail_on_load:
                outputs.append(lifecycle.finish(request, "error", error=LOAD_ERROR))
            else:
                lifecycle.kv.publish(request, good)
                lifecycle.kv.free(request)
                request.transfer.give_up()
        lifecycle.loaded(request)
        return outputs

    def _lose_blocks(self, bad: set[tuple[int, int]], step: LaunchedStep) -> list[EngineOutput]:
        lifecycle = self._lifecycle
        lifecycle.kv.lose(bad)
        outputs = []
        for request in list(lifecycle.requests.values()):
            first = lifecycle.kv.num_before(request, bad)
            if first is not None:
                request.reported.lose(first)
            if request.state is RequestState.LOADING:
                if first is not None:
                    request.transfer.lose(first)
            elif first is not None:
                if request in step.requests:
                    # the step that loaded was this or an earlier one, so what came before the gap did arrive
                    request.transfer.await_step(False)
                    lifecycle.kv.publish(request, first)
                lifecycle.kv.withdraw_request(request, first)
                request.transfer.give_up()
                if self._fail_on_load:
                    outputs.append(lifecycle.finish(request, "error", error=LOAD_ERROR))
                else:
                    lifecycle.roll_back(request)
            elif request.num_unanswered:
                # preempted in flight: whether it held one of them is no longer known
                lifecycle.roll_back(request)
        return outputs


def rows_of(rows: LogprobRows, part: slice) -> LogprobRows:
    """The log-probabilities of some positions."""
    return LogprobRows(token_ids=rows.token_ids[part], logprobs=rows.logprobs[part], ranks=rows.ranks[part])
