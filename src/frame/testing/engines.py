"""Runs requests of token ids through a real engine, for suites that compare tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
import numpy as np

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.tree import FrameConfig
from frame.core.engine.engine import Engine
from frame.core.engine.grammar.compiler import GrammarCompiler
from frame.core.engine.schedule.scheduler import Scheduler
from frame.core.front.tokenizer import TokenizerSource
from frame.core.interfaces.client import EngineInfo
from frame.core.interfaces.connector import ConnectorScheduler, NullConnectorScheduler
from frame.core.interfaces.engine import EngineOutput, EngineRequest
from frame.core.interfaces.executor import Executor
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.pooling_params import PoolingParams
from frame.core.interfaces.sampling import SamplingParams, StructuredOutputsParams
from frame.core.interfaces.scheduling import SchedulerPolicy
from frame.core.plugin_host.registry import Registry
from frame.offline.in_process import make_engine
from frame.transfers.merging import ResultMerge

from .fake_cache import VOCAB
from .setups import make_setup

PROMPT_LENGTHS = (60, 3, 33, 1, 17, 48)
#: Small enough for tiny models, large enough for several blocks and chunks.
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 400, "dtype": "float32"}


@contextmanager
def running(config: FrameConfig, registry: Registry) -> Iterator[Engine]:
    """An engine that is closed at the end; it serves grammars where the checkpoint has a tokenizer."""
    tokenizer = TokenizerSource(config, read_checkpoint(config), registry)
    engine = make_engine(config, registry, vocabulary=tokenizer.vocabulary)
    try:
        yield engine
    finally:
        engine.close()


def prompts(vocab_size: int, lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 7) -> list[list[int]]:
    """Random prompts, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.choices(range(3, vocab_size), k=length) for length in lengths]


def request(name: str, prompt: Sequence[int], num_tokens: int = 12, seed: int = 0, **params: Any) -> EngineRequest:
    """A greedy request that does not stop early, unless `params` say otherwise."""
    return EngineRequest(
        request_id=name,
        prompt_ids=np.array(prompt, np.int32),
        params=SamplingParams(
            **{"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": num_tokens, **params}
        ),
        max_tokens=num_tokens,
        seed=seed,
    )


def drain(engine: Engine, requests: Sequence[EngineRequest], limit: int = 20_000) -> dict[str, list[EngineOutput]]:
    """Adds the requests and steps until all of them ended; their outputs by id. An error of a request fails."""
    outputs: dict[str, list[EngineOutput]] = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add(one)
    for _ in range(limit):
        if not engine.has_unfinished():
            return outputs
        for output in engine.step():
            assert output.error is None, f"request {output.request_id} failed: {output.error}"
            outputs[output.request_id].append(output)
    raise AssertionError(f"the engine did not finish {len(requests)} requests in {limit} steps")


def mixed_requests(engine: Engine, given: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Tokens by name of requests that are greedy and random in turn, of unlike lengths, added two at a time."""
    return added_in_turn(
        engine,
        [
            request(f"{place}", prompt, 4 + 3 * place, seed=place, temperature=(0.0, 0.8)[place % 2])
            for place, prompt in enumerate(given)
        ],
    )


def every_kind(given: Sequence[Sequence[int]], amount: int) -> list[EngineRequest]:
    """A request of each kind that the sampler treats apart, and of the first prompt a second output (n = 2).

    Of biases, ids, bad words and log-probabilities they name more with a larger `amount`. One obeys a
    grammar, so the checkpoint needs a tokenizer.
    """
    ids = list(range(5, 6 + amount))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "logprobs": amount},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.9, "frequency_penalty": 0.3, "logprobs": 40 + amount},
        {"logit_bias": dict.fromkeys(ids, 2.0)},
        {"allowed_token_ids": ids},
        {"min_tokens": 4, "stop_token_ids": ids, "ignore_eos": False},
        {"bad_words_token_ids": [ids, [5], [6, 7]]},
        {"prompt_logprobs": amount},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
    ]
    made = [
        request(f"kind-{place}", given[place % len(given)], 8 + place, seed=place, **kind)
        for place, kind in enumerate(kinds)
    ]
    return [*made, request("second", given[0], 9, seed=99, temperature=0.8)]


def added_in_turn(engine: Engine, requests: Sequence[EngineRequest], together: int = 2) -> dict[str, list[int]]:
    """The output tokens by request name; a given number of requests is added between two steps."""
    left = list(requests)
    outputs: dict[str, list[EngineOutput]] = {one.request_id: [] for one in left}
    while left or engine.has_unfinished():
        for one in left[:together]:
            engine.add(one)
        del left[:together]
        for output in engine.step():
            assert output.error is None, f"request {output.request_id} failed: {output.error}"
            outputs[output.request_id].append(output)
    return {name: tokens_of(found) for name, found in outputs.items()}


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    """All token ids of a request."""
    return [token for output in outputs for token in output.token_ids]


def greedy(engine: Engine, given: Sequence[Sequence[int]], num_tokens: int = 12) -> list[list[int]]:
    """The output tokens of each prompt; all prompts run in one batch."""
    outputs = drain(engine, [request(str(index), prompt, num_tokens) for index, prompt in enumerate(given)])
    return [tokens_of(outputs[str(index)]) for index in range(len(given))]


def pooled(engine: Engine, given: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The pooled row of each prompt, its first token's where each token has one; all prompts run in one batch."""
    facts = engine.info.pooling
    per_token = facts is not None and not {"embed", "classify"} & set(facts.tasks)
    params = PoolingParams(reads_cache=False, per_token=per_token)
    asked = [
        msgspec.structs.replace(request(str(index), prompt, 1), pooling=params) for index, prompt in enumerate(given)
    ]
    outputs = drain(engine, asked)
    rows = [outputs[one.request_id][-1].pooled for one in asked]
    return [row[0] for row in rows if row is not None]


def no_grammars() -> GrammarCompiler:
    """Returns a compiler that refuses every constraint."""

    def refuse() -> NoReturn:
        raise ValueError("structured_outputs cannot be served: the engine was built without a vocabulary")

    return GrammarCompiler(refuse, refuse, cache_bytes=0)


def fake_engine(
    config: FrameConfig,
    executor: Executor,
    policy: SchedulerPolicy,
    layout: KVLayout,
    connector: ConnectorScheduler | None = None,
    max_model_len: int = 96,
    compiler: GrammarCompiler | None = None,
) -> Engine:
    """frame's scheduler and step loop over an executor of fake workers, which is started."""
    facts = executor.load()
    executor.allocate(layout)
    connector = connector or NullConnectorScheduler(make_setup("connector", config=config, layout=layout))
    scheduler = Scheduler(
        config=config,
        layout=layout,
        policy=policy,
        connector=connector,
        max_model_len=max_model_len,
        max_in_flight=executor.max_in_flight,
        compiler=compiler or no_grammars(),
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        num_blocks=layout.pools[0],
        block_size=layout.block_size,
        platform="fake",
        attention=["fake"],
        dtype="float32",
    )
    return Engine(
        scheduler=scheduler,
        executor=executor,
        connector=connector,
        info=info,
        merge=ResultMerge(len(facts), scheduler.lifecycle.awaits),
    )
