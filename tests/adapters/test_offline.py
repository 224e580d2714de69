"""`LLM` with adapters: PEFT's merged weights token for token, in batches with others, with few slots, by any ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from frame import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, RequestOutputKind, SamplingParams
from frame.core.config.flat import from_flat
from frame.core.front.prompts import InvalidRequest
from frame.core.plugin_host.registry import Registry
from frame.offline.in_process import make_engine
from frame.testing.checkpoints import make_checkpoint
from frame.testing.thread_executor import with_threads

from .cases import SMALL, make_adapter, merged_tokens

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own

COUNT = 12
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [5, 6, 7, 8, 9, 20, 21], [30]]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16},
    "some": {"r": 1, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]},
    "rs": {
        "r": 16,
        "lora_alpha": 8,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 4, "layers.1.mlp.up_proj": 3},
        "alpha_pattern": {"k_proj": 2, "o_proj": 30},
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return {
        name: make_adapter(base, base.parent / name, seed=seed, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def wanted(base: Path, adapters: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    every: dict[str | None, Path | None] = {None: None, **adapters}
    return {name: merged_tokens(base, folder, PROMPTS, COUNT) for name, folder in every.items()}


@contextmanager
def running(base: Path, **settings: Any) -> Iterator[LLM]:
    with LLM(str(base), **{**SMALL, **settings}) as llm:
        yield llm


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False, **changes)


def tokens(llm: LLM, prompts: Sequence[Sequence[int]], requests: Any) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": list(one)} for one in prompts], params(), lora_request=requests, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def requests_of(adapters: dict[str, Path]) -> dict[str | None, LoRARequest | None]:
    found = {name: LoRARequest(name, place, str(path)) for place, (name, path) in enumerate(adapters.items(), 1)}
    return {None: None, **found}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_loras": 4}, id="a slot for each"),
        pytest.param({"max_loras": 1}, id="one slot"),
        pytest.param({"max_loras": 2, "max_num_batched_tokens": 8, "max_num_seqs": 8}, id="prompts in chunks"),
        pytest.param({"max_loras": 2, "num_gpu_blocks_override": 13, "block_size": 4}, id="preempted"),
    ],
)
def test_a_batch_of_all_equals_merged_weights(
    base: Path, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]], settings: dict[str, Any]
) -> None:
    of = requests_of(adapters)
    pairs = [(name, place) for place in range(len(PROMPTS)) for name in of]
    with running(base, **settings) as llm:
        found = tokens(llm, [PROMPTS[place] for _, place in pairs], [of[name] for name, _ in pairs])
    assert found == [wanted[name][place] for name, place in pairs]
    assert len({tuple(wanted[name][0]) for name in of}) == len(of), "the adapters change nothing"


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.matrix)],
    ids=["tp2", "pp2"],
)
def test_ranks_share_adapters(
    base: Path, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]], settings: dict[str, Any]
) -> None:
    of = requests_of(adapters)
    with running(base, max_loras=4, **settings) as llm:
        found = tokens(llm, PROMPTS[:1] * len(of), list(of.values()))
    assert found == [wanted[name][0] for name in of]


@pytest.mark.some(1)
@pytest.mark.parametrize("most", [16, 17], ids=["even", "odd"])
def test_ranks_divide_the_first_matrices_where_they_are_asked_to(
    base: Path, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]], most: int
) -> None:
    """Layers that divide their outputs hold half of all A, by rank; what they add is the same."""

    def held(worker: Any) -> dict[str, int]:
        return {name: one.nbytes for name, one in worker.model.named_buffers() if name.endswith("adapter_down")}

    of, settings = requests_of(adapters), {"max_loras": 4, "max_lora_rank": most, "tensor_parallel_size": 2}
    with running(base, fully_sharded_loras=True, **settings) as llm:
        assert tokens(llm, PROMPTS[:1] * len(of), list(of.values())) == [wanted[name][0] for name in of]
    sizes = []
    for sharded in (False, True):
        values = {**SMALL, **settings, "model": str(base), "executor": "threads", "fully_sharded_loras": sharded}
        engine = make_engine(from_flat(values), with_threads(Registry.load()))
        first, second = engine.executor.call("run", {"function": held})
        engine.close()
        assert first == second
        sizes.append(first)
    whole, divided = sizes
    assert whole.keys() == divided.keys()
    rank = most + most % 2
    for name, size in divided.items():
        by_inputs = name.endswith(("output.adapter_down", "down.adapter_down"))
        assert size * (1 if by_inputs else 2) * most == whole[name] * (most if by_inputs else rank), name
    assert sum(divided.values()) < 0.75 * sum(whole.values())


def test_deterministic_requests_get_equal_bits_in_any_batch(base: Path, adapters: dict[str, Path]) -> None:
    of = requests_of(adapters)
    asked = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, deterministic=True, logprobs=1
    )

    def logprobs(llm: LLM, names: list[str | None]) -> list[Any]:
        prompts = [{"prompt_token_ids": PROMPTS[0]} for _ in names]
        outputs = llm.generate(prompts, asked, lora_request=[of[name] for name in names], use_tqdm=False)
        return [
            [sorted(one.logprob for one in step.values()) for step in output.outputs[0].logprobs] for output in outputs
        ]

    with running(base, max_loras=3, enable_prefix_caching=False) as llm:
        alone = {name: logprobs(llm, [name])[0] for name in of}
        names = ["all", None, "all", "some", "rs", "all"]
        assert logprobs(llm, names) == [alone[name] for name in names]


def test_prompts_of_two_adapters_share_no_block(base: Path, adapters: dict[str, Path]) -> None:
    of = requests_of(adapters)
    prompt = list(range(3, 43))
    with running(base, max_loras=2, block_size=4) as llm:
        cached = [
            llm.generate({"prompt_token_ids": prompt}, params(), lora_request=of[name], use_tqdm=False)[0]
            for name in (None, "all", "some", None, "all", "some")
        ]
    assert [one.num_cached_tokens > 0 for one in cached] == [False] * 3 + [True] * 3


def test_reading_again_serves_the_new_content_and_shares_nothing(
    base: Path, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]], tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    folder.symlink_to(adapters["all"])
    first, again = (LoRARequest("changing", 7, str(folder), load_inplace=flag) for flag in (False, True))
    with running(base, max_loras=2, max_num_seqs=4) as llm:
        engine = llm.llm_engine
        assert tokens(llm, PROMPTS[:1], first) == wanted["all"][:1]
        engine.add_request("before", {"prompt_token_ids": PROMPTS[0]}, params(), lora_request=first)
        engine.step()
        folder.unlink()
        folder.symlink_to(adapters["rs"])
        assert tokens_of(engine, {"after": again}, also="before") == {
            "before": wanted["all"][0],
            "after": wanted["rs"][0],
        }
        assert tokens(llm, PROMPTS[:1], first) == wanted["rs"][:1]


def tokens_of(engine: Any, requests: dict[str, LoRARequest], also: str) -> dict[str, list[int]]:
    for name, adapter in requests.items():
        engine.add_request(name, {"prompt_token_ids": PROMPTS[0]}, params(), lora_request=adapter)
    found: dict[str, list[int]] = {}
    while len(found) < len(requests) + bool(also):
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    return found


def test_unloading_lets_running_requests_finish(
    base: Path, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    of = requests_of(adapters)
    with running(base, max_loras=1) as llm:
        engine = llm.llm_engine
        engine.add_request("runs", {"prompt_token_ids": PROMPTS[0]}, params(), lora_request=of["all"])
        engine.add_request("waits", {"prompt_token_ids": PROMPTS[0]}, params(), lora_request=of["some"])
        engine.step()
        assert engine.list_loras() == {1, 2}
        assert engine.remove_lora(1)
        assert engine.remove_lora(2)
        assert not engine.remove_lora(2)
        assert engine.list_loras() == set()
        engine.add_request("other", {"prompt_token_ids": PROMPTS[0]}, params(), lora_request=of["rs"])
        found = dict[str, list[int]]()
        while len(found) < 3:
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
    assert found == {"runs": wanted["all"][0], "waits": wanted["some"][0], "other": wanted["rs"][0]}


def test_the_host_keeps_those_that_were_used_last_and_those_that_are_pinned(
    base: Path, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    of = requests_of(adapters)
    with running(base, max_loras=1, max_cpu_loras=2) as llm:
        table = llm.llm_engine.core.scheduler.adapters
        for name in ("all", "some", "rs", "all", "some"):
            assert tokens(llm, PROMPTS[:1], of[name]) == wanted[name][:1]
            assert sum(one.on_host for one in table._by_name.values()) <= 2
        assert llm.llm_engine.pin_lora(2)
        with pytest.raises(ValueError, match="cannot be pinned"):
            llm.llm_engine.pin_lora(1)
        for name in ("all", "rs", "all", "rs"):
            assert tokens(llm, PROMPTS[:1], of[name]) == wanted[name][:1]
        assert table._by_name["some"].on_host


def test_an_adapter_that_vanished_ends_its_requests_alone(base: Path, tmp_path: Path) -> None:
    kept = make_adapter(base, tmp_path / "kept", seed=4)
    lost = make_adapter(base, tmp_path / "lost", seed=5)
    of = {name: LoRARequest(name, place, str(tmp_path / name)) for place, name in enumerate(("kept", "lost"), 1)}
    with running(base, max_loras=1, max_cpu_loras=1) as llm:
        tokens(llm, PROMPTS[:1], of["lost"])
        tokens(llm, PROMPTS[:1], of["kept"])  # whose copy on the host takes the place of the other's
        (lost / "adapter_model.safetensors").unlink()
        engine = llm.llm_engine
        engine.add_request("lost", {"prompt_token_ids": PROMPTS[0]}, params(), lora_request=of["lost"])
        engine.add_request("kept", {"prompt_token_ids": PROMPTS[0]}, params(), lora_request=of["kept"])
        ended = {}
        while len(ended) < 2:
            ended |= {one.request_id: one.outputs[0] for one in engine.step() if one.finished}
    assert kept.is_dir()
    assert ended["lost"].finish_reason == "error"
    assert ended["kept"].finish_reason == "length"


def test_a_starved_adapter_gets_its_turn(base: Path, adapters: dict[str, Path]) -> None:
    of = requests_of(adapters)
    with running(base, max_loras=1, max_num_seqs=2) as llm:
        engine = llm.llm_engine
        number, done = 0, set[str]()

        def add(name: str, adapter: str) -> None:
            engine.add_request(name, {"prompt_token_ids": [5, 6]}, params(), lora_request=of[adapter])

        for number in range(3):
            add(f"crowd-{number}", "all")
        add("waits", "some")
        while "waits" not in done and number < 200:
            for output in engine.step():
                if output.finished:
                    done.add(output.request_id)
                    number += 1
                    add(f"crowd-{number + 3}", "all")
        engine.abort_request([f"crowd-{one}" for one in range(number + 4)])
    assert number < 60


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (object(), "must be a LoRARequest, got object"),
        (LoRARequest("x", 0, "/x"), "must be a whole number from 1, got 0"),
        (LoRARequest("", 1, "/x"), "needs a lora_name and a lora_path"),
        (LoRARequest("x", 1, "/nowhere/at/all"), "/nowhere/at/all has no adapter_config.json"),
        ([None, None], "2 adapters were given for 1 prompts"),
    ],
)
def test_wrong_requests_are_one_sentence(shared: LLM, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        tokens(shared, PROMPTS[:1], given)


def test_a_number_stands_for_one_folder(shared: LLM, adapters: dict[str, Path]) -> None:
    tokens(shared, PROMPTS[:1], LoRARequest("all", 11, str(adapters["all"])))
    for wrong in (LoRARequest("all", 12, str(adapters["all"])), LoRARequest("other", 11, str(adapters["some"]))):
        with pytest.raises(InvalidRequest, match="contradicts an earlier one, 'all'"):
            tokens(shared, PROMPTS[:1], wrong)


@pytest.fixture(scope="module")
def shared(base: Path) -> Iterator[LLM]:
    with running(base, max_loras=2) as llm:
        yield llm


def test_the_asynchronous_engine_serves_adapters(
    base: Path, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    of = requests_of(adapters)

    async def serve() -> dict[str | None, list[int]]:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(base), **{**SMALL, "max_loras": 2}))
        try:
            asked = params()
            asked.output_kind = RequestOutputKind.FINAL_ONLY

            async def one(name: str | None) -> list[int]:
                prompt = {"prompt_token_ids": PROMPTS[0]}
                async for output in llm.generate(prompt, asked, f"request {name}", lora_request=of[name]):
                    last = output
                return list(last.outputs[0].token_ids)

            found = dict(zip(of, await asyncio.gather(*map(one, of)), strict=True))
            assert await llm.list_loras() == {1, 2, 3}
            assert await llm.remove_lora(1)
            with pytest.raises(InvalidRequest, match="/nowhere has no adapter_config"):
                await llm.add_lora(LoRARequest("x", 9, "/nowhere"))
            return found
        finally:
            llm.shutdown()

    assert asyncio.run(serve()) == {name: wanted[name][0] for name in of}
