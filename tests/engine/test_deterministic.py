"""Deterministic requests: the same bits alone, in any batch and chunks, from the prefix cache, after a preemption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.interfaces.engine import EngineOutput, EngineRequest
from frame.core.plugin_host.registry import Registry
from frame.offline.in_process import make_engine
from frame.testing.engines import drain, prompts, request, tokens_of
from frame.testing.tiny import write_tiny

pytestmark = pytest.mark.product

PROMPTS = prompts(512, (60, 3, 33, 1, 17, 48))
PROMPTS.append(PROMPTS[0][:40] + PROMPTS[2])  # shares blocks with the first
NUM_TOKENS = 9
#: kinds of requests: each is also tried alone
KINDS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 1},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logprobs": 2},
    {"prompt_logprobs": 2, "logprobs": 1},
]
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sync": {"async_scheduling": False, "enable_prefix_caching": False},
    "small chunks": {"max_num_batched_tokens": 11, "max_num_seqs": 4},
    "few blocks": {"num_gpu_blocks_override": 22, "max_model_len": 96, "block_size": 8},
}
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 300, "dtype": "float32", "enable_prefix_caching": True}


def engine_of(folder: Path, **given: Any) -> Engine:
    return make_engine(from_flat({"model": str(folder), **SMALL, **given}), Registry.load())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "Qwen3ForCausalLM")
    return path


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    made = {name: engine_of(folder, **given) for name, given in ENGINES.items()}
    yield made
    for engine in made.values():
        engine.close()


def asked(name: str, prompt: int, kind: int, *, deterministic: bool = True) -> EngineRequest:
    return request(name, PROMPTS[prompt], NUM_TOKENS, seed=5 + kind, **KINDS[kind], deterministic=deterministic)


def bits(outputs: list[EngineOutput]) -> tuple[Any, ...]:
    """Its tokens and, float by float, its log-probabilities, however they were split over outputs."""
    own = [output.logprobs for output in outputs if output.logprobs is not None]
    scored = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert own, "no log-probabilities came"
    return (
        tuple(tokens_of(outputs)),
        *(b"".join(part.token_ids.tobytes() for part in rows) for rows in (own, scored)),
        *(b"".join(part.logprobs.tobytes() for part in rows) for rows in (own, scored)),
    )


class Alone:
    """What each request gives when nothing else was ever asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found: dict[tuple[int, int], tuple[Any, ...]] = {}

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, ...]:
        if key not in self._found:
            self._found[key] = bits(drain(self._engine, [asked("a", *key)])["a"])
        return self._found[key]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Alone]:
    engine = engine_of(folder, enable_prefix_caching=False, async_scheduling=False)
    yield Alone(engine)
    engine.close()


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, len(KINDS) - 1),
        st.booleans(),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(ENGINES)), batch=REQUESTS)
def test_bits_do_not_depend_on_the_schedule(
    engines: dict[str, Engine], alone: Alone, name: str, batch: list[tuple[int, int, bool, int]]
) -> None:
    engine = engines[name]
    waiting = [
        (delay, asked(str(index), prompt, kind, deterministic=deterministic or index == 0))
        for index, (prompt, kind, deterministic, delay) in enumerate(batch)
    ]
    outputs: dict[str, list[EngineOutput]] = {one.request_id: [] for _, one in waiting}
    for turn in range(2000):
        for one in [one for delay, one in waiting if delay == turn]:
            engine.add(one)
        waiting = [(delay, one) for delay, one in waiting if delay > turn]
        if not waiting and not engine.has_unfinished():
            break
        for output in engine.step() if engine.has_unfinished() else []:
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
    for index, (prompt, kind, deterministic, _) in enumerate(batch):
        if deterministic or index == 0:
            assert bits(outputs[str(index)]) == alone[prompt, kind], f"request {index} of {batch} on {name!r}"


def test_the_schedules_preempt_requests_and_find_cached_prefixes(engines: dict[str, Engine]) -> None:
    for name, engine in engines.items():
        drain(engine, [asked(f"{name}-{index}", index % len(PROMPTS), 0) for index in range(9)])
    stats = {name: engine.stats() for name, engine in engines.items()}
    assert stats["few blocks"].preemptions > 0
    assert stats["plain"].prefix_hits > 0


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_layers_and_dtypes(tmp_path: Path, architecture: str, dtype: str) -> None:
    write_tiny(tmp_path, architecture)
    engine = engine_of(tmp_path, dtype=dtype, max_num_batched_tokens=37, enable_prefix_caching=False)
    try:
        single = [bits(drain(engine, [asked("a", prompt, 1)])["a"]) for prompt in (6, 2, 3)]
        together = drain(engine, [asked(str(index), prompt, 1) for index, prompt in enumerate((6, 2, 3, 0, 1))])
    finally:
        engine.close()
    assert [bits(together[str(index)]) for index in range(3)] == single


def test_ordinary_blocks_are_never_read_by_deterministic_requests_nor_the_reverse(folder: Path) -> None:
    engine = engine_of(folder)
    try:
        hits = []
        for index, deterministic in enumerate((True, False, True, False)):
            drain(engine, [asked(str(index), 0, 0, deterministic=deterministic)])
            hits.append(engine.stats().prefix_hits)
    finally:
        engine.close()
    assert hits[0] == hits[1] == 0
    assert hits[1] < hits[2] < hits[3]
