"""The front: everything textual about requests, between callers and an engine that knows ids only.

Plain calls without threads or loops, so that `LLM`, `LLMEngine` and `AsyncLLM` share it. Keeps the record of every
unfinished request; knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from frame.links.encoder_prompts import NO_CHAT
from frame.quoting import quoted

from ..config.checkpoint import Checkpoint
from ..config.tree import FrameConfig
from ..interfaces.adapters import AdapterSource
from ..interfaces.client import EngineInfo
from ..interfaces.engine import EngineOutput, EngineRequest
from ..interfaces.pooling_params import PoolingParams
from ..interfaces.sampling import SamplingParams
from ..interfaces.tokenizer import ChatOptions
from .input_processor import InputProcessor, default_sampling_params
from .outputs import RequestMetrics
from .pooling import PoolingAdmission, PoolingRecord
from .prompts import InvalidRequest, ParsedPrompt, parse_prompt
from .request_record import RequestRecord
from .template import read_template, render_chat
from .tokenizer import TokenizerSource

Record = RequestRecord | PoolingRecord


class Front:
    """Admits requests and turns the engine's outputs into text.

    `info` is what the engine reports once it is ready. `validators` are further checks of sampling parameters.
    """

    def __init__(
        self,
        config: FrameConfig,
        checkpoint: Checkpoint,
        info: EngineInfo,
        *,
        tokenizer: TokenizerSource,
        validators: Sequence[Callable[[SamplingParams], None]] = (),
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.source = tokenizer
        self.source.get_or_none()  # load at the start, not with the first request
        self.default_sampling_params = default_sampling_params(checkpoint.generation)
        self.chat_template = read_template(config.model.chat_template)
        #: called for each finished request with its times and the (finish reason, number of tokens) of its outputs
        self.on_finished: Callable[[RequestMetrics, Sequence[tuple[str, int]]], None] | None = None
        self.info = info
        self._admission = InputProcessor(config, checkpoint, info, self.source, validators)
        self._pooling: PoolingAdmission | None = None
        if info.pooling is not None:
            self._pooling = PoolingAdmission(info, info.pooling, self.source, config.pooler)
        self._records: dict[str, Record] = {}
        self._sequences: dict[str, tuple[Record, Any]] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._records)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an output."""
        return self._admission.eos_token_ids

    def submit(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        kv_transfer: dict[str, Any] | None = None,
        owner: str = "",
        adapter: AdapterSource | None = None,
        follows: str | None = None,
    ) -> list[EngineRequest]:
        """Admits a request of `owner`, with an `adapter` that is loaded; opens its record, returns what is to be run.

        Raises `InvalidRequest`, and then nothing is kept.
        """
        if request_id in self._records:
            raise InvalidRequest(f"request id {quoted(request_id)} is in use by an unfinished request", "request_id")
        if priority and self.config.scheduler.scheduling_policy in ("fcfs", "fair"):
            raise InvalidRequest(
                f"priority {priority} needs scheduling_policy 'priority'; its present policy ignores priorities",
                "priority",
            )
        record: Record = self._admission_of(params).admit(request_id, parse_prompt(prompt), params)
        taken = next((one.request_id for one in record.requests if one.request_id in self._sequences), None)
        if taken is not None:  # child i of request "a" is "i_a"
            raise InvalidRequest(
                f"request id {quoted(request_id)} needs {quoted(taken)}, which is in use by another request",
                "request_id",
            )
        self._records[request_id] = record
        for sequence in record.sequences:
            self._sequences[sequence.request.request_id] = record, sequence
        for request in record.requests:
            request.priority, request.kv_transfer, request.owner = priority, kv_transfer, owner
            request.adapter, request.follows = adapter, follows
        return record.requests

    def require(self, task: str) -> None:
        """Raises `InvalidRequest` unless the model does `task`: "generate" or one of `PoolingTask`."""
        kind, choices = "generates text", "generate (--runner pooling makes it pool)"
        tasks: Sequence[str] = ["generate"]
        if self.info.pooling is not None:
            tasks = self.info.pooling.tasks
            kind, choices = "pools", ", ".join(tasks)
        if task not in tasks:
            raise InvalidRequest(f"the model {kind}, so it cannot do {quoted(task)}; it can: {choices}", "model")

    def _admission_of(self, params: SamplingParams | PoolingParams) -> Any:
        """What admits requests with such `params`; raises `InvalidRequest` where the model serves none."""
        if isinstance(params, PoolingParams):
            self.require(params.task or "encode")
            return self._pooling
        self.require("generate")
        return self._admission

    def tokenize(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> ParsedPrompt:
        """The prompt with its ids, which `submit` then takes as they are; callers run it on a thread for long texts."""
        tokenized: ParsedPrompt = self._admission_of(params).tokenize(prompt, params)
        return tokenized

    def pair(self, first: str, second: str, params: PoolingParams, chat_template: str | None = None) -> ParsedPrompt:
        """Two texts as one prompt of a reranker.

        A model with a chat template gets them as two messages of the roles "query" and "document", any other model gets
        their ids with the tokenizer's special tokens around and between them.
        """
        template = chat_template or self.chat_template
        if template is None:
            joined: ParsedPrompt = self._admission_of(params).pair(first, second, params)
            return joined
        messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
        chat = self.render_chat(messages, ChatOptions(chat_template=template, add_generation_prompt=False))
        return self.tokenize(ParsedPrompt(chat.text, chat.token_ids), params)

    def process(self, outputs: Iterable[EngineOutput]) -> tuple[list[Any], list[str]]:
        """Turns engine outputs into request outputs, and engine ids to abort because a stop string ended them."""
        now = time.time()
        touched: dict[str, Record] = {}
        ended: list[str] = []
        for output in outputs:
            found = self._sequences.get(output.request_id)
            if found is None:
                continue  # the front ended it before the engine learned of the abort
            record, sequence = found
            if output.num_drafts:
                record.metrics.count_drafts(output.num_drafts, output.num_accepted)
            if output.finish_reason is None and record.metrics.first_token_time is not None:
                if sequence.quiet:  # fast path for most outputs of an offline run: nothing is shown before the end
                    sequence.token_ids += output.token_ids
                    continue
                if sequence.takes_fast_path and output.kv_transfer is None:  # fast path for streams
                    record.metrics.last_token_time = now
                    sequence.push_fast(output.token_ids)
                    touched[record.request_id] = record
                    continue
            if record.push(sequence, output, now):
                ended.append(output.request_id)
            if sequence.finish_reason is not None:
                del self._sequences[output.request_id]
            touched[record.request_id] = record
        return self._take(touched, now), ended

    def replay(self, engine_id: str) -> EngineRequest | None:
        """An unfinished engine request for another engine to continue, with all tokens emitted so far.

        None when it has ended meanwhile.
        """
        found = self._sequences.get(engine_id)
        if found is None:
            return None
        record, sequence = found
        request: EngineRequest = sequence.request
        return msgspec.structs.replace(
            request,
            replayed=True,
            output_ids=list(sequence.token_ids),
            num_prompt_logprobs=record.num_prompt_logprobs if sequence.index == 0 else 0,
        )

    def abort(self, request_ids: Iterable[str]) -> tuple[list[Any], list[str]]:
        """Ends requests now; returns their last outputs and the engine ids to abort. Unknown ids are ignored."""
        touched: dict[str, Record] = {}
        ended: list[str] = []
        for request_id in request_ids:
            record = self._records.get(request_id)
            if record is None:
                continue
            sequences: Sequence[Any] = record.sequences
            for sequence in sequences:
                if self._sequences.pop(sequence.request.request_id, None) is not None:
                    ended.append(sequence.request.request_id)
                    record.end(sequence)
            touched[request_id] = record
        return self._take(touched, time.time()), ended

    @property
    def longest_chat(self) -> int:
        """Most characters of a rendered conversation that can be of use, even truncated."""
        return self._admission.longest_text(cut=True)

    def with_template(self, options: ChatOptions) -> ChatOptions:
        """The options, completed with the configured chat template and content format where they give none.

        Raises `InvalidRequest` for a model that does not go on with what it reads.
        """
        if self.info.encodes:
            raise InvalidRequest(NO_CHAT, "messages")
        if options.content_format == "auto":
            options = replace(options, content_format=self.config.model.chat_template_content_format)
        if options.chat_template is None and self.chat_template is not None:
            return replace(options, chat_template=self.chat_template)
        return options

    def render_chat(self, messages: Sequence[Any], options: ChatOptions) -> ParsedPrompt:
        """A conversation as a prompt, with the configured template unless `options` bring one."""
        options = self.with_template(options)
        return render_chat(
            self.source.get(), messages, options, lambda text: self._admission.check_length(text, cut=True)
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises `InvalidRequest` for one that is too long to be used even when truncated."""
        self._admission.check_length(text, cut=True)
        return self.source.get().encode(text, add_special_tokens)

    def _take(self, touched: dict[str, Record], now: float) -> list[Any]:
        outputs = []
        for request_id, record in touched.items():
            output = record.take(now)
            if output is None:
                continue
            outputs.append(output)
            if output.finished:
                del self._records[request_id]
                if self.on_finished is not None:
                    self.on_finished(record.metrics, record.ends())
        return outputs
