"""The methods of `LLM` for pooling models: encode, embed, classify, reward, score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from frame.core.front.outputs import PoolingOutput, PoolingRequestOutput
from frame.core.front.prompts import InvalidRequest, ParsedPrompt, parse_prompt
from frame.core.interfaces.pooling_params import PoolingParams, PoolingTask

from .engine import LLMEngine
from .pooled_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .progress_bar import ProgressOption
from .prompts import as_prompts
from .unserved import refuse_unserved

Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingCalls:
    """The methods of `LLM` for pooling models.

    One PoolingParams holds for all prompts, a list has one for each prompt; outputs come in the order of the prompts.
    """

    llm_engine: LLMEngine

    def _run(self, pairs: Sequence[tuple[Any, Any]], priorities: Sequence[int], use_tqdm: ProgressOption) -> list[Any]:
        """Runs the requests (prompt, parameters); returns their finished outputs in the same order."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Any,
        pooling_params: Params = None,
        *,
        use_tqdm: ProgressOption = True,
        lora_request: Any = None,
        pooling_task: PoolingTask | None = None,
        **unused: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The rows that the model computes for `pooling_task`, by default the first of its tasks, as they are.

        Raises `InvalidRequest` (a `ValueError`) before anything runs for what cannot be served.
        """
        refuse_unserved(self.encode, lora_request=lora_request, **unused)
        return self._pool(prompts, pooling_params, use_tqdm, pooling_task)

    def _pool(
        self, prompts: Any, pooling_params: Params, use_tqdm: ProgressOption, pooling_task: PoolingTask | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        given = as_prompts(prompts)
        pairs = list(zip(given, _pair(pooling_params, len(given), pooling_task), strict=True))
        ready = _tokenize(self.llm_engine, pairs)
        # an attention backend attends prompts of equal length in one call where they lie side by side
        order = sorted(range(len(ready)), key=lambda place: _length(ready[place][0]))
        found = self._run([ready[place] for place in order], [0] * len(order), use_tqdm)
        outputs = [output for _, output in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]
        for place, output in enumerate(outputs):
            if output.outputs.error is not None:
                raise RuntimeError(f"prompt {place} was not pooled: {output.outputs.error}")
        return outputs

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: ProgressOption = True,
        pooling_params: Params = None,
        lora_request: Any = None,
        **unused: Any,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text."""
        refuse_unserved(self.embed, lora_request=lora_request, **unused)
        outputs = self._pool(prompts, pooling_params, use_tqdm, "embed")
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Any,
        *,
        use_tqdm: ProgressOption = True,
        pooling_params: Params = None,
        lora_request: Any = None,
        **unused: Any,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class for each text."""
        refuse_unserved(self.classify, lora_request=lora_request, **unused)
        outputs = self._pool(prompts, pooling_params, use_tqdm, "classify")
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Any,
        *,
        use_tqdm: ProgressOption = True,
        pooling_params: Params = None,
        lora_request: Any = None,
        **unused: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """A row of scores for each token of each text, or for each token that ends a step of reasoning."""
        refuse_unserved(self.reward, lora_request=lora_request, **unused)
        return self._pool(prompts, pooling_params, use_tqdm, "reward")

    def score(
        self,
        data_1: Any,
        data_2: Any,
        *,
        use_tqdm: ProgressOption = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        chat_template: str | None = None,
        **unused: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts match: one with one, one with each of many, or many pairwise.

        A cross-encoder reads each pair; with an embedding model the score is the cosine of two embeddings.
        """
        refuse_unserved(self.score, lora_request=lora_request, **unused)
        first, second = _sides(data_1, data_2)
        front = self.llm_engine.front
        params = pooling_params or PoolingParams()
        if front.info.pooling is not None and "embed" in front.info.pooling.tasks:
            vectors = self.embed([*first, *second], use_tqdm=use_tqdm, pooling_params=params)
            return _cosines(vectors, len(first), len(second))
        front.require("score")
        texts = zip(first * (len(second) // len(first)), second, strict=True)
        pairs = [front.pair(one, other, params, chat_template) for one, other in texts]
        outputs = self._pool(pairs, params, use_tqdm, "score")
        return [ScoringRequestOutput.from_base(output) for output in outputs]


def _pair(params: Params, count: int, task: PoolingTask | None) -> list[PoolingParams]:
    """A PoolingParams for each prompt; `task`, where it is given, replaces the tasks in `params`."""
    given = list(params) if isinstance(params, Sequence) else [params or PoolingParams()] * count
    if len(given) != count:
        raise InvalidRequest(f"{len(given)} pooling params were given for {count} prompts", "pooling_params")
    ready: dict[int, PoolingParams] = {}
    for one in given:
        if not isinstance(one, PoolingParams):
            raise InvalidRequest(f"pooling_params must be PoolingParams, got {type(one).__name__}", "pooling_params")
        if id(one) not in ready:
            ready[id(one)] = one.clone()
            ready[id(one)].task = task or one.task
    return [ready[id(one)] for one in given]


def _tokenize(engine: LLMEngine, pairs: list[tuple[Any, PoolingParams]]) -> list[tuple[Any, PoolingParams]]:
    """The prompts, where they are texts with their ids. All texts are passed to the tokenizer at once, for its threads.

    InputProcessor tokenises the texts that are to be truncated and those that may be too long.
    """
    parsed = [(parse_prompt(prompt), params) for prompt, params in pairs]
    bound = engine.front.info.max_model_len * 16
    plain = [
        place
        for place, (prompt, params) in enumerate(parsed)
        if prompt.text
        and prompt.token_ids is None
        and params.truncate_prompt_tokens is None
        and len(prompt.text) < bound
    ]
    if not plain:
        return list(parsed)
    ready: list[tuple[Any, PoolingParams]] = list(parsed)
    encoded = engine.front.source.get().encode_batch([parsed[place][0].text or "" for place in plain])
    for place, ids in zip(plain, encoded, strict=True):
        prompt, params = parsed[place]
        ready[place] = ParsedPrompt(prompt.text, np.array(ids, np.int64), prompt.salt), params
    return ready


def _length(prompt: Any) -> int:
    """Tokens of a prompt, 0 where its text is not tokenised yet."""
    return len(prompt.token_ids) if isinstance(prompt, ParsedPrompt) and prompt.token_ids is not None else 0


def _sides(data_1: Any, data_2: Any) -> tuple[list[str], list[str]]:
    first = [data_1] if isinstance(data_1, str) else list(data_1)
    second = [data_2] if isinstance(data_2, str) else list(data_2)
    for text in (*first, *second):
        if not isinstance(text, str):
            raise InvalidRequest(f"texts to score must be strings, got {type(text).__name__}", "data_1")
    if not first or not second:
        raise InvalidRequest("there is nothing to score: give texts on both sides", "data_1")
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{len(first)} texts cannot be scored against {len(second)}: give one, or as many as on the other side",
            "data_1",
        )
    return first, second


def _cosines(found: list[EmbeddingRequestOutput], num_first: int, num_second: int) -> list[ScoringRequestOutput]:
    first, second = found[:num_first], found[num_first:]
    return [
        ScoringRequestOutput(
            output.request_id,
            ScoringOutput(_cosine(first[place % num_first].outputs.embedding, output.outputs.embedding)),
            [*first[place % num_first].prompt_token_ids, *output.prompt_token_ids],
            output.num_cached_tokens,
        )
        for place, output in enumerate(second)
    ]


def _cosine(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """The cosine of the angle between two embeddings: the score of texts where there is no cross-encoder."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0
