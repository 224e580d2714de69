"""InputProcessor: a prompt and its sampling parameters, checked against the model, become engine requests.

Every refusal is an `InvalidRequest` of one sentence. Knows the text side and the model's limits; no engine.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from frame.links.encoder_prompts import NO_ENCODER, both_sides, decoder_start
from frame.links.prompt_embeds import check_embeds
from frame.quoting import quoted

from ..config.checkpoint import Checkpoint
from ..config.tree import FrameConfig
from ..interfaces.client import EngineInfo
from ..interfaces.engine import NO_TOKEN, EngineRequest
from ..interfaces.sampling import SamplingParams, StructuredOutputsParams
from ..interfaces.tokenizer import Tokenizer
from .prompts import InvalidRequest, ParsedPrompt
from .request_record import RequestRecord
from .tokenizer import TokenizerSource

#: The fields of generation_config.json that sampling parameters take under the same name.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_MAX_CHILDREN = 16384
#: A text that is only counted or will be truncated may be this many times as long as the longest that could fit.
_CUT_LENGTHS = 8
_SEED_MASK = 2**64 - 1


def derive_seed(seed: int, number: int) -> int:
    """A 64-bit seed from a seed and a number; equal everywhere, unrelated for neighbouring numbers."""
    data = struct.pack("<QQ", seed & _SEED_MASK, number & _SEED_MASK)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def default_sampling_params(generation: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of requests that bring none, from the values of generation_config.json."""
    values = {name: generation[name] for name in _DEFAULTS if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        values["max_tokens"] = generation["max_new_tokens"]
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"generation_config: {error}; override it with override_generation_config") from None


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises `InvalidRequest` for a prompt without tokens, or with one that the model does not have."""
    if len(ids) == 0:
        raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
    if ids.view(f"u{ids.itemsize}").max() >= vocab_size:  # read as unsigned, a negative id is larger than any
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        raise InvalidRequest(
            f"prompt token {int(wrong[0])} is {ids[wrong[0]]}, but ids go from 0 to {vocab_size - 1}", "prompt"
        )


class InputProcessor:
    """Admits requests. It counts them, because a request without a seed gets one that is derived from its number.

    `info` is what the engine reports once it is ready. `validators` are further checks of sampling parameters (logits
    processors'); they raise `ValueError`.
    """

    def __init__(
        self,
        config: FrameConfig,
        checkpoint: Checkpoint,
        info: EngineInfo,
        tokenizer: TokenizerSource,
        validators: Sequence[Callable[[SamplingParams], None]] = (),
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._info = info
        self._tokenizer = tokenizer
        self._validators = list(validators)
        self._num_admitted = 0

    def admit(self, request_id: str, prompt: ParsedPrompt, params: SamplingParams) -> RequestRecord:
        """Raises `InvalidRequest` naming the field, its value and its bounds."""
        arrival = time.time()
        self._check_params(params)
        if self._info.encodes or prompt.encoder is not None:
            prompt = self.tokenize(prompt, params)
        encoder = prompt.encoder
        ids, listed = self._prompt_ids(prompt, params)
        params = self._complete(params)
        seed = params.seed if params.seed is not None else derive_seed(self._config.model.seed, self._num_admitted)
        self._num_admitted += 1
        first = EngineRequest(
            request_id=request_id,
            prompt_ids=ids,
            params=params,
            max_tokens=self._max_tokens(len(ids), params),
            seed=seed & _SEED_MASK,
            eos_token_ids=self.eos_token_ids,
            arrival=arrival,
            salt=prompt.salt,
            embeds=prompt.embeds,
            encoder_ids=None if encoder is None or encoder.token_ids is None else encoder.token_ids.astype(np.int32),
        )
        tokenizer = self._tokenizer.get_or_none() if params.detokenize else None
        interval = self._config.scheduler.stream_interval
        record = RequestRecord(request_id, prompt.text, listed, params, _children(first), tokenizer, interval)
        record.encoder = encoder
        return record

    def tokenize(self, prompt: ParsedPrompt, params: SamplingParams) -> ParsedPrompt:
        """The prompt with ids; raises `InvalidRequest` for a text that cannot fit."""
        if self._info.encodes or prompt.encoder is not None:
            return self._both_sides(prompt, params)
        if prompt.token_ids is not None:
            return prompt
        text = prompt.text or ""
        self.check_length(text, cut=params.truncate_prompt_tokens is not None)
        ids = self._tokenizer.get().encode(text) if text else []
        return ParsedPrompt(prompt.text, np.array(ids, np.int64), prompt.salt, listed=ids)

    def _both_sides(self, prompt: ParsedPrompt, params: SamplingParams) -> ParsedPrompt:
        """The prompt of a model with an encoder, whose part may be truncated; raises `InvalidRequest`."""
        if not self._info.encodes:
            raise InvalidRequest(NO_ENCODER, "encoder_prompt")
        limit, keep = self._info.max_model_len, params.truncate_prompt_tokens
        start = decoder_start(self._checkpoint.generation, self._checkpoint.hf)

        def encode(text: str, special: bool) -> list[int]:
            self.check_length(text, cut=keep is not None)
            return self._tokenizer.get().encode(text, add_special_tokens=special)

        check = partial(check_ids, vocab_size=self._info.vocab_size)
        return both_sides(prompt, start, limit, limit if keep == -1 else keep, encode, check)

    def check_length(self, text: str, *, cut: bool) -> None:
        """Raises `InvalidRequest` for a text that cannot be used even when truncated.

        Checked before tokenising, which takes time in proportion to the text. A text that will be truncated (`cut`) may
        be longer.
        """
        if len(text) <= self._info.max_model_len:
            return
        longest = self.longest_text(cut=cut)
        if len(text) > longest:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters; with a model of {self._info.max_model_len} tokens "
                f"at most {longest} are read",
                "prompt",
            )

    def longest_text(self, *, cut: bool) -> int:
        """Most characters of a text that can be of use, even truncated."""
        return self._info.max_model_len * self._tokenizer.get().max_token_chars * (_CUT_LENGTHS if cut else 1)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an output: the checkpoint's and the tokenizer's. All requests share the list."""
        ids = dict.fromkeys(self._checkpoint.eos_token_ids)
        tokenizer = self._tokenizer.get_or_none()
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ids[tokenizer.eos_token_id] = None
        return list(ids)

    def _prompt_ids(self, prompt: ParsedPrompt, params: SamplingParams) -> tuple[np.ndarray, list[int]]:
        """The prompt's ids, truncated as asked and checked: as int32 [n] for the engine, as a list for the caller."""
        limit = self._info.max_model_len
        keep = params.truncate_prompt_tokens
        if keep is not None and keep >= limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be below the model's {limit} tokens, got {keep}", "truncate_prompt_tokens"
            )
        prompt = self.tokenize(prompt, params)
        if prompt.embeds is not None:
            check_embeds(prompt.embeds, self._info.embed_size)
            for name in ("prompt_logprobs", "truncate_prompt_tokens"):
                if getattr(params, name) is not None:
                    raise InvalidRequest(f"{name} is not for prompts with prompt_embeds; leave it out", name)
        if keep is not None and prompt.encoder is None:
            prompt = prompt.cut(limit - 1 if keep == -1 else keep)
        ids = prompt.token_ids
        if ids is None:
            raise InvalidRequest("a prompt needs text or token ids", "prompt")
        if len(ids) >= limit:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens, but the model takes {limit} with at least one for the output; "
                "shorten it, or set truncate_prompt_tokens",
                "prompt",
            )
        check_ids(ids if prompt.embeds is None else np.where(ids == NO_TOKEN, 0, ids), self._info.vocab_size)
        return ids.astype(np.int32, copy=False), prompt.ids

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        left = self._info.max_model_len - prompt_len
        caps = (left, params.max_tokens, self._checkpoint.generation.get("max_new_tokens"))
        return min(cap for cap in caps if cap is not None)

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        try:
            params.verify()  # fields may have been set since
            for validate in self._validators:
                validate(params)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        if params.n > _MAX_CHILDREN:
            raise InvalidRequest(f"n must be at most {_MAX_CHILDREN}, got {params.n}", "n")
        if params.deterministic and self._info.not_deterministic:
            raise InvalidRequest(
                f"deterministic is not available on this engine: {self._info.not_deterministic}", "deterministic"
            )
        if params.structured_outputs is not None:
            self._check_constraint(params.structured_outputs)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(params, name)) is not None:
                self._check_logprobs(name, value)
        self._check_token_ids(params)
        if params.stop:
            self._tokenizer.get()  # stop strings need text

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if ids := getattr(params, name):
                self._check_vocabulary(name, ids)
        if params.bad_words_token_ids:
            self._check_vocabulary("bad_words_token_ids", list(chain.from_iterable(params.bad_words_token_ids)))

    def _check_constraint(self, constraint: StructuredOutputsParams) -> None:
        """Checks the length of the constraint's text; the engine checks what it compiles to."""
        name = f"structured_outputs.{constraint.constraint}"
        try:
            length = len(msgspec.json.encode(constraint))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} is not plain JSON: {error}", "structured_outputs") from None
        most = self._config.structured_outputs.max_grammar_length
        if length > most:
            raise InvalidRequest(
                f"{name} has {length} characters, but at most {most} are taken (max_grammar_length)",
                "structured_outputs",
            )
        self._check_vocabulary("structured_outputs.start_after", constraint.start_after)
        self._tokenizer.get()  # a grammar needs text

    def _check_logprobs(self, name: str, value: int) -> None:
        most = self._config.model.max_logprobs
        wanted = self._info.vocab_size if value == -1 else value
        if most != -1 and wanted > most:
            raise InvalidRequest(f"{name} must be at most {most} (max_logprobs), got {value}", name)

    def _check_vocabulary(self, name: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        largest = max(ids, default=0)  # `SamplingParams.verify` has refused negative ids
        if largest >= self._info.vocab_size:
            raise InvalidRequest(
                f"{name} holds {largest}, but token ids go from 0 to {self._info.vocab_size - 1}", name
            )

    def _complete(self, params: SamplingParams) -> SamplingParams:
        """A copy of the parameters for the engine, completed with the token ids that only the front knows."""
        changes: dict[str, Any] = {}
        if params.bad_words:
            tokenizer = self._tokenizer.get()
            changes["bad_words_token_ids"] = [
                spelling for word in params.bad_words for spelling in _spellings(tokenizer, word)
            ]
        if len(params.allowed_token_ids or ()) > self._info.vocab_size:
            changes["allowed_token_ids"] = list(dict.fromkeys(params.allowed_token_ids or ()))
        if self._config.model.deterministic and not params.deterministic:
            changes["deterministic"] = True
        return msgspec.structs.replace(params, **changes) if changes else params.clone()


def _spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """The ids of a word at the start of a text and, where that differs, after a space."""
    bare = tokenizer.encode(word.lstrip() or word, add_special_tokens=False)
    spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
    if not bare:
        raise InvalidRequest(f"bad_words holds {quoted(word)}, which the tokenizer turns into nothing", "bad_words")
    return [bare] if spaced[-len(bare) :] == bare else [bare, spaced]


def _children(first: EngineRequest) -> list[EngineRequest]:
    """One engine request per output. Child i of several draws with hash(seed, i); only the first scores the prompt."""
    params = first.params
    if params.n == 1:
        return [first]
    requests = []
    for index in range(params.n):
        scored = params.prompt_logprobs if index == 0 else None
        requests.append(
            msgspec.structs.replace(
                first,
                request_id=f"{index}_{first.request_id}",
                params=msgspec.structs.replace(params, n=1, prompt_logprobs=scored),
                seed=derive_seed(first.seed, index),
            )
        )
    return requests
