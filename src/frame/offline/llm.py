"""`LLM`: offline inference. Prompts in, finished outputs back, in order; the engine runs in the caller's process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

from frame.core.config.flat import from_flat
from frame.core.front.outputs import RequestOutput
from frame.core.front.prompts import InvalidRequest, ParsedPrompt, parse_prompt
from frame.core.interfaces.sampling import RequestOutputKind, SamplingParams
from frame.core.interfaces.tokenizer import ChatOptions, ContentFormat

from .beam import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, search
from .engine import LLMEngine
from .metrics import Metric
from .pooling import PoolingCalls
from .progress_bar import Progress, ProgressOption
from .prompts import TokensPrompt, as_prompts
from .unserved import refuse_unserved

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(PoolingCalls):
    """A model and its engine.

    `LLM()` is the demo model that ships with frame. Keywords are the engine's settings under vLLM's names (the fields
    of `EngineArgs`); None means the default. Raises one error with the root cause when the engine cannot start.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self.llm_engine = LLMEngine.from_config(from_flat({"model": model, **settings}))
        self.request_counter = itertools.count()

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Wraps a running engine."""
        llm = cls.__new__(cls)
        llm.llm_engine = engine
        llm.request_counter = itertools.count()
        return llm

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Params = None,
        use_tqdm: ProgressOption = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        *,
        prompt_token_ids: Any = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Completes prompts (text, token ids, dicts, or a list of them); outputs come in the order of the prompts.

        One SamplingParams serves all prompts, a list pairs with them, None takes the model's defaults; so does one
        `LoRARequest` or a list of them, in which None means the model without an adapter. Raises
        `InvalidRequest` (a `ValueError`) before anything runs; then no request of this call is left in the engine.
        """
        refuse_unserved(self.generate, **unused)
        parsed = _legacy(prompts, prompt_token_ids)
        pairs = self._pair(parsed, sampling_params)
        if priority is not None and len(priority) != len(parsed):
            raise InvalidRequest(f"{len(priority)} priorities were given for {len(parsed)} prompts", "priority")
        return self._run(pairs, list(priority or [0] * len(parsed)), use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: ProgressOption = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; arguments as `generate` and `preprocess_chat`."""
        refuse_unserved(self.chat, **unused)
        prompts = self._render(
            messages,
            ChatOptions(
                chat_template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs or {},
            ),
        )
        return self._run(self._pair(prompts, sampling_params), [0] * len(prompts), use_tqdm, lora_request)

    def preprocess_chat(
        self,
        messages: Sequence[Any],
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """Renders conversations without running them; `chat_template` is a template, a file, or None for the default.

        `continue_final_message` leaves the last message open and excludes `add_generation_prompt`.
        """
        prompts = self._render(
            messages,
            ChatOptions(
                chat_template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs or {},
            ),
        )
        return [TokensPrompt(prompt_token_ids=one.ids, prompt=one.text or "") for one in prompts]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: ProgressOption = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt; `concurrency_limit` prompts at a time."""
        refuse_unserved(self.beam_search, lora_request=lora_request)
        front = self.llm_engine.front
        if front.info.encodes:
            raise InvalidRequest("beam search is not for a model with an encoder and a decoder", "prompt")
        searches = []
        for prompt in as_prompts(prompts):
            parsed = parse_prompt(prompt)
            if parsed.embeds is not None:
                raise InvalidRequest("beam search takes no prompt_embeds; give text or token ids", "prompt_embeds")
            ids = parsed.ids if parsed.token_ids is not None else front.source.get().encode(parsed.text or "")
            beams = [BeamSearchSequence(ids)]
            searches.append(BeamSearch(params, len(ids), frozenset(front.eos_token_ids), beams))
        batch = concurrency_limit or len(searches) or 1
        with Progress(use_tqdm, params.max_tokens * -(-len(searches) // batch), "Beam search", "token") as progress:
            for start in range(0, len(searches), batch):
                search(
                    searches[start : start + batch], self._generate_quietly, front.info.max_model_len, progress.advance
                )
        tokenizer = front.source.get_or_none()
        return [one.result(None if tokenizer is None else tokenizer.decode) for one in searches]

    def get_tokenizer(self) -> Any:
        """The tokenizer of the library that reads it, which is transformers unless `tokenizer_mode` names another."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that requests without any get, from the model's generation config."""
        return self.llm_engine.front.default_sampling_params.clone()

    @property
    def default_sampling_params(self) -> SamplingParams:
        return self.get_default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        """The present value of every metric; raises `RuntimeError` unless disable_log_stats=False."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empties the prefix cache."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Does nothing: models take text only, so no media is kept."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker by name, or a callable with the worker; returns the answers by rank."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Stores the weights as each worker holds them, for starts that divide and quantise the model alike.

        The folder is then a checkpoint of its own, with the configuration and the tokenizer. `pattern` names the files
        ("model-rank-{rank}-part-{part}.safetensors"), of at most `max_size` bytes each.
        """
        chosen = {"path": str(path), "pattern": pattern, "max_size": max_size}
        self.collective_rpc("save_sharded_state", kwargs={k: v for k, v in chosen.items() if v is not None})

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls `func(model)` in every worker; returns the answers by rank."""
        return self.llm_engine.apply_model(func)

    def start_profile(self) -> None:
        """Begins a profiler trace."""
        self.llm_engine.start_profile()

    def stop_profile(self) -> Any:
        """Ends the trace."""
        return self.llm_engine.stop_profile()

    def sleep(self, level: int = 1) -> None:
        """Frees device memory until `wake_up`; raises where the platform cannot."""
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates the device memory again, for the given tags or all: "weights", "kv_cache"."""
        self.llm_engine.wake_up(tags)

    def close(self) -> None:
        """Frees the device. `with LLM(…) as llm:` does it at its end, and Python when it deletes the object."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        engine = getattr(self, "llm_engine", None)
        if engine is not None:
            with suppress(Exception):
                engine.close()

    def _render(self, messages: Sequence[Any], options: ChatOptions) -> list[ParsedPrompt]:
        single = not messages or isinstance(messages[0], Mapping)
        return [self.llm_engine.front.render_chat(one, options) for one in ([messages] if single else messages)]

    def _pair(self, prompts: Sequence[Any], params: Params) -> list[tuple[Any, SamplingParams]]:
        """Each prompt with a copy of its sampling parameters that asks for one output, at the end."""
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, Sequence):
            _check_type(params)
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"{len(params)} sampling params were given for {len(prompts)} prompts", "sampling_params"
            )
        return [(prompt, _final_only(one)) for prompt, one in zip(prompts, params, strict=True)]

    def _run(
        self,
        pairs: Sequence[tuple[Any, Any]],
        priorities: Sequence[int],
        use_tqdm: ProgressOption,
        adapters: Any = None,
    ) -> list[Any]:
        engine = self.llm_engine
        listed = list(adapters) if isinstance(adapters, list | tuple) else [adapters] * len(pairs)
        if len(listed) != len(pairs):
            raise InvalidRequest(f"{len(listed)} adapters were given for {len(pairs)} prompts", "lora_request")
        positions: dict[str, int] = {}
        results: list[Any] = [None] * len(pairs)
        try:
            for position, (prompt, params) in enumerate(pairs):
                request_id = str(next(self.request_counter))
                with _naming(position, len(pairs)):
                    engine.add_request(
                        request_id, prompt, params, lora_request=listed[position], priority=priorities[position]
                    )
                positions[request_id] = position
            with Progress(use_tqdm, len(pairs), "Processed prompts", "prompt") as progress:
                while positions:
                    outputs = engine.step()
                    if not outputs and not engine.core.has_unfinished():
                        raise RuntimeError(f"the engine lost {len(positions)} requests")
                    for output in outputs:
                        position_of = positions.pop(output.request_id, None)
                        if output.finished and position_of is not None:
                            results[position_of] = output
                            progress.finish(output)
        finally:
            engine.abort_request(list(positions))  # requests that an error or an interrupt left unfinished
        return [output for output in results if output is not None]

    def _generate_quietly(self, prompts: list[TokensPrompt], params: SamplingParams) -> list[RequestOutput]:
        return self.generate(prompts, params, use_tqdm=False)


@contextmanager
def _naming(position: int, count: int) -> Iterator[None]:
    """Adds to an `InvalidRequest` raised inside which of several prompts it is about."""
    try:
        yield
    except InvalidRequest as error:
        if count == 1:
            raise
        raise InvalidRequest(f"prompt {position} of {count}: {error}", error.param) from error


def _check_type(params: Any) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params")


def _final_only(params: SamplingParams) -> SamplingParams:
    _check_type(params)
    if params.output_kind == RequestOutputKind.FINAL_ONLY:
        return params
    final = params.clone()
    if final is params:
        return params
    final.output_kind = RequestOutputKind.FINAL_ONLY
    final.skip_clone = True  # nobody else refers to this copy
    return final


def _legacy(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """Prompts as a list; token ids may come in an argument of their own, as in older vLLM versions."""
    if prompt_token_ids is None:
        if prompts is None:
            raise InvalidRequest("generate needs prompts", "prompt")
        return as_prompts(prompts)
    ids = as_prompts(prompt_token_ids)
    if prompts is None:
        return ids
    texts = as_prompts(prompts)
    if len(texts) != len(ids):
        raise InvalidRequest(f"{len(texts)} prompts were given with {len(ids)} lists of token ids", "prompt")
    return [TokensPrompt(prompt=text, prompt_token_ids=one) for text, one in zip(texts, ids, strict=True)]
