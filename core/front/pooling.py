"""The text side of pooling: prompts and pooling parameters become engine requests, their rows become outputs.

Knows the engine's `PoolingFacts`, but neither tensors nor poolers.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from ..config.model import PoolerConfig
from ..interfaces.client import EngineInfo
from ..interfaces.engine import EngineOutput, EngineRequest, Fault, FinishReason
from ..interfaces.pooling_params import PoolingFacts, PoolingParams, PoolingTask
from ..interfaces.sampling import SamplingParams
from ..interfaces.tokenizer import SpecialFrame
from .input_processor import check_ids
from .outputs import PoolingOutput, PoolingRequestOutput, RequestMetrics
from .prompts import NO_ENCODER, InvalidRequest, ParsedPrompt
from .tokenizer import TokenizerSource

_EMBEDS: frozenset[PoolingTask] = frozenset(("embed", "token_embed"))
_TOKENS: frozenset[PoolingTask] = frozenset(("token_embed", "token_classify", "reward"))
_NO_SAMPLING = SamplingParams(max_tokens=1)


class PoolingAdmission:
    """Admits requests of a pooling engine.

    `pooler` says whether texts that are longer than the model's limit are embedded in parts, and how long they may be.
    """

    def __init__(self, info: EngineInfo, facts: PoolingFacts, tokenizer: TokenizerSource, pooler: PoolerConfig) -> None:
        self.facts = facts
        self._info = info
        self._tokenizer = tokenizer
        self._splits_long_texts = pooler.enable_chunked_processing
        self._max_embed_len = pooler.max_embed_len

    def admit(self, request_id: str, prompt: ParsedPrompt, params: PoolingParams) -> PoolingRecord:
        """Raises `InvalidRequest` naming the field, its value and its bounds."""
        arrival = time.time()
        params = self._complete(params, prompt)
        ids = self.tokenize(prompt, params).ids
        parts = self._parts(ids, prompt, params)
        if len(parts) > 1:  # the front cuts and normalises the mean of the parts
            asked = msgspec.structs.replace(params, dimensions=self.facts.size, normalize=False)
        else:
            asked = params
        requests = [
            EngineRequest(
                request_id=request_id if len(parts) == 1 else f"{index}_{request_id}",
                prompt_ids=np.array(part, np.int32),
                params=_NO_SAMPLING,
                max_tokens=1,
                seed=0,
                arrival=arrival,
                salt=prompt.salt,
                pooling=asked,
            )
            for index, part in enumerate(parts)
        ]
        return PoolingRecord(request_id, ids, params, requests, self.facts)

    def tokenize(self, prompt: ParsedPrompt, params: PoolingParams) -> ParsedPrompt:
        """The prompt with its ids, truncated as `params` ask but for special tokens. Raises `InvalidRequest`."""
        keep = params.truncate_prompt_tokens
        limit = self._info.max_model_len
        if prompt.encoder is not None:
            raise InvalidRequest(NO_ENCODER, "encoder_prompt")
        if prompt.embeds is not None:
            raise InvalidRequest("prompt_embeds are for models that generate; this one pools", "prompt_embeds")
        if keep is not None and keep > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most the model's {limit} tokens, got {keep}",
                "truncate_prompt_tokens",
            )
        keep = limit if keep == -1 else keep
        if prompt.token_ids is not None:
            ids = prompt.token_ids if keep is None else prompt.token_ids[-keep:]
        else:
            ids = np.array(self._encode(prompt.text or "", keep), np.int64)
        check_ids(ids, self._info.vocab_size)
        return ParsedPrompt(prompt.text, ids, prompt.salt, prompt.second_segment)

    def pair(self, first: str, second: str, params: PoolingParams) -> ParsedPrompt:
        """Two texts as one prompt of a cross-encoder."""
        tokenizer = self._tokenizer.get()
        keep = params.truncate_prompt_tokens
        one, other = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
        ids, begin = tokenizer.special_frame.pair(one, other, self._info.max_model_len if keep == -1 else keep)
        second_segment = begin if self.facts.segments else -1
        return ParsedPrompt(token_ids=np.array(ids, np.int64), second_segment=second_segment)

    def _encode(self, text: str, keep: int | None) -> list[int]:
        tokenizer = self._tokenizer.get()
        longest = (self._max_embed_len or self._info.max_model_len) * tokenizer.max_token_chars
        unbounded = keep is not None or (self._splits_long_texts and self._max_embed_len is None)
        if len(text) > longest and not unbounded:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters; the {longest // tokenizer.max_token_chars} tokens that are "
                f"taken hold at most {longest}",
                "prompt",
            )
        ids = tokenizer.encode(text)
        if keep is None or len(ids) <= keep:
            return ids
        return tokenizer.special_frame.single(tokenizer.encode(text, add_special_tokens=False), keep)

    def _parts(self, ids: list[int], prompt: ParsedPrompt, params: PoolingParams) -> list[list[int]]:
        """The prompt in one part, or in several that are embedded apart where it is longer than the model takes."""
        limit, most = self._info.max_model_len, self._max_embed_len
        if len(ids) <= limit:
            return [ids]
        whole = params.task != "embed" or prompt.second_segment >= 0
        if whole or not self._splits_long_texts or (most is not None and len(ids) > most):
            remedy = "shorten it, or set truncate_prompt_tokens"
            if not whole:
                remedy += f" (max_embed_len is {most})" if self._splits_long_texts else " or enable_chunked_processing"
            raise InvalidRequest(f"the prompt has {len(ids)} tokens, but the model takes {limit}; {remedy}", "prompt")
        frame = SpecialFrame() if prompt.text is None else self._tokenizer.get().special_frame
        return frame.parts(ids, limit)

    def _complete(self, params: PoolingParams, prompt: ParsedPrompt) -> PoolingParams:
        """A copy for the engine, checked against what the model can do; it says how the engine has to pool."""
        facts = self.facts
        try:
            params.verify()  # fields may have been set since
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        task = params.task or "encode"
        if task == "encode":
            task = facts.tasks[0]
        for name, wrong in (("normalize", task not in _EMBEDS), ("use_activation", task in _EMBEDS)):
            if wrong and getattr(params, name) is not None:
                raise InvalidRequest(f"{name} has no meaning for task {task!r}; leave it out", name)
        self._check_dimensions(params.dimensions, task)
        per_token = task in _TOKENS
        return msgspec.structs.replace(
            params,
            task=task,
            per_token=per_token,
            reads_cache=facts.cached_tokens if per_token else facts.cached_sequence,
            second_segment=prompt.second_segment,
        )

    def _check_dimensions(self, dimensions: int | None, task: PoolingTask) -> None:
        facts = self.facts
        if dimensions is None or (dimensions == facts.size and task in _EMBEDS):
            return
        if task not in _EMBEDS:
            raise InvalidRequest(f"dimensions has no meaning for task {task!r}; leave it out", "dimensions")
        if not facts.matryoshka:
            raise InvalidRequest(
                f"dimensions must be {facts.size} or left out, got {dimensions}: the model was not trained for "
                "shorter embeddings (if it was, --hf-overrides '{\"is_matryoshka\": true}' says so)",
                "dimensions",
            )
        if dimensions > facts.size or (facts.embedding_sizes and dimensions not in facts.embedding_sizes):
            choices = ", ".join(map(str, facts.embedding_sizes)) or f"1 to {facts.size}"
            raise InvalidRequest(f"dimensions must be one of {choices}, got {dimensions}", "dimensions")


class PooledPart:
    """One engine request of a pooling request, and what the engine returned for it."""

    quiet = takes_fast_path = False

    def __init__(self, index: int, request: EngineRequest) -> None:
        self.index = index
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.rows: np.ndarray | None = None
        self.error: str | None = None
        self.fault: Fault = "engine"


class PoolingRecord:
    """One pooling request and the rows that the engine returned.

    The engine runs `requests`, one for the whole prompt or one for each part in which a long text is embedded.
    """

    num_prompt_logprobs = 0

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: PoolingParams,
        requests: list[EngineRequest],
        facts: PoolingFacts,
    ) -> None:
        self.request_id = request_id
        self.requests = requests
        self.sequences = [PooledPart(index, request) for index, request in enumerate(requests)]
        self.metrics = RequestMetrics(requests[0].arrival)
        self._prompt_ids = prompt_ids
        self._params = params
        self._facts = facts
        self._num_cached = 0

    def ends(self) -> list[tuple[str, int]]:
        """How each part ended, and its number of output tokens, which is 0."""
        return [(str(part.finish_reason), 0) for part in self.sequences]

    def push(self, part: PooledPart, output: EngineOutput, now: float) -> bool:
        """Takes the only output of a part."""
        self.metrics.first_token_time = self.metrics.last_token_time = now
        self._num_cached += output.num_cached or 0
        part.rows, part.error, part.fault = output.pooled, output.error, output.fault
        part.finish_reason = output.finish_reason
        return False

    def end(self, part: PooledPart) -> None:
        """Ends a part as aborted."""
        if part.finish_reason is None:
            part.finish_reason = "abort"

    def take(self, now: float) -> PoolingRequestOutput[PoolingOutput] | None:
        """The answer once all parts are there, else None."""
        if any(part.finish_reason is None for part in self.sequences):
            return None
        self.metrics.finished_time = now
        return PoolingRequestOutput(self.request_id, self._output(), self._prompt_ids, self._num_cached)

    def _output(self) -> PoolingOutput:
        rows = [part.rows for part in self.sequences if part.rows is not None]
        if len(rows) < len(self.sequences):
            failed = next(part for part in self.sequences if part.rows is None)
            return PoolingOutput(np.zeros(0, np.float32), failed.error or "the request was aborted", failed.fault)
        if self._params.per_token:
            return PoolingOutput(rows[0])
        if len(rows) == 1:
            return PoolingOutput(rows[0][0])
        weights = np.array([len(part.request.prompt_ids) for part in self.sequences], np.float64)
        return PoolingOutput(self._join(np.average(np.concatenate(rows), axis=0, weights=weights)))

    def _join(self, mean: np.ndarray) -> np.ndarray:
        """Cuts and normalises the mean of the embeddings of a text's parts as the request asks."""
        params, facts = self._params, self._facts
        mean = mean[: params.dimensions or facts.size]
        normalize = facts.normalize if params.normalize is None else params.normalize
        length = float(np.linalg.norm(mean))
        return (mean / length if normalize and length else mean).astype(np.float32)
