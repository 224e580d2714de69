"""Engines that share experts become more and fewer while they serve: no text changes, and experts follow the map."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frame import AsyncLLM, SamplingParams
from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry
from frame.interfaces import API_VERSION, Provider
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, prompts

from .expert_slots import digest

NUM_EXPERTS = 8
#: Experts are placed again all the time.
OFTEN = {"enable_eplb": True, "eplb_window_size": 8, "eplb_step_interval": 6}


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package offered the extension."""
    load = Registry.load
    places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))  # for engine processes
    provider = Provider("expert-slots", "tests.parallel.expert_slots:ExpertSlots", api=f"=={API_VERSION}")

    def with_extension(only: Any = None) -> Registry:
        registry = load(only)
        registry.offers.append(Offer("extension", provider, HERE, ""))
        return registry

    monkeypatch.setattr(Registry, "load", with_extension)


def digests_of(folder: Path) -> dict[str, str]:
    """Of each expert in the checkpoint, by its name, what lies in a slot that has it."""
    tensors = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    parts = [name.removesuffix(".gate_proj.weight") for name in tensors if name.endswith(".gate_proj.weight")]
    return {
        name: digest(
            torch.cat([tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up")]).float(),
            tensors[f"{name}.down_proj.weight"].float(),
        )
        for name in parts
        if ".experts." in name
    }


class Load:
    """Requests that come one after the other from several callers, until `end`; each must give its own text."""

    def __init__(self, llm: AsyncLLM, callers: int) -> None:
        self._llm, self._ending = llm, False
        self.num_ended = 0
        self._texts: dict[int, list[int]] = {}
        self._callers = [asyncio.create_task(self._call(place)) for place in range(callers)]

    async def _call(self, place: int) -> None:
        while not self._ending:
            ids = await generated(self._llm, f"{place}-{self.num_ended}", place)
            assert ids == self._texts.setdefault(place, ids)
            self.num_ended += 1

    async def end(self) -> dict[int, list[int]]:
        """Lets what runs end; the text of each caller."""
        self._ending = True
        await asyncio.gather(*self._callers)
        return self._texts


async def generated(llm: AsyncLLM, name: str, place: int) -> list[int]:
    """The tokens of a request, greedy or drawn, which never are taken back while they come."""
    params = SamplingParams(
        temperature=(0.0, 0.8)[place % 2],
        seed=place,
        max_tokens=40,
        ignore_eos=True,
        detokenize=False,
        extra_args={"fault": "slow"},  # so that engines which start get processor time
    )
    ids: list[int] = []
    async for output in llm.generate({"prompt_token_ids": prompts(400)[place]}, params, name):
        came = list(output.outputs[0].token_ids)
        assert came[: len(ids)] == ids
        ids = came
    assert output.outputs[0].finish_reason == "length"
    return ids


async def settled_slots(llm: AsyncLLM) -> list[list[dict[str, Any]]]:
    """What every worker holds, once all tell the same map: engines may still end their last steps one by one."""
    for _ in range(100):
        answers = await llm.collective_rpc("slots")
        if all(len({str(one["all"]) for one in layers}) == 1 for layers in zip(*answers, strict=True)):
            break
        await asyncio.sleep(0.1)
    return answers


async def check_slots(llm: AsyncLLM, folder: Path, devices: int, redundant: int) -> None:
    """Every slot of every rank holds the weights of the expert that the map names, and all ranks have one map."""
    wanted, answers = digests_of(folder), await settled_slots(llm)
    assert len(answers) == devices
    for layers in zip(*answers, strict=True):
        assert len({str(one["all"]) for one in layers}) == 1
        held = [expert for one in layers for expert in one["experts"]]
        assert len(held) == NUM_EXPERTS + redundant
        assert set(held) == set(range(NUM_EXPERTS))
        assert [one["first"] for one in layers] == [place * len(held) // devices for place in range(devices)]
        if layers[0]["all"] is None:
            assert held == list(range(NUM_EXPERTS))
        else:
            assert held == layers[0]["all"]
        for one in layers:
            names = [f"{one['layer']}.{expert}" for expert in one["experts"]]
            assert one["digests"] == [wanted[name] for name in names]


async def scaled_under_load(folder: Path, sizes: list[int], callers: int, redundant: int = 0, **settings: Any) -> None:
    """Starts the first of `sizes` engines and scales to the others, and compares with an undisturbed run."""
    values = {
        **SMALL, "model": str(folder), "skip_tokenizer_init": True, "num_threads": 1, "standby_engine": False,
        "data_parallel_size": sizes[0], "enable_expert_parallel": True, "worker_extension": "expert-slots",
        "logits_processors": ["tests.server.faulty_processor:FaultyProcessor"], **settings,
    }  # fmt: skip
    llm = await asyncio.to_thread(AsyncLLM.from_config, from_flat(values))
    try:
        expected = {place: await generated(llm, f"alone-{place}", place) for place in range(callers)}
        for size in sizes[1:]:
            load, before = Load(llm, callers), llm.num_replayed
            await llm.scale_elastic_ep(size)
            ended = load.num_ended
            while load.num_ended < ended + callers:
                await asyncio.sleep(0.02)
            assert await load.end() == expected
            assert llm.num_replayed > before
            devices = size * settings.get("tensor_parallel_size", 1)
            await check_slots(llm, folder, devices, redundant if devices > 1 else 0)
            assert [(one.rank, one.problem) for one in (await llm.stats()).ranks] == [(r, None) for r in range(size)]
        with pytest.raises(ValueError, match="new_data_parallel_size must be a whole number from 1 to 64, got 0"):
            await llm.scale_elastic_ep(0)
        if redundant:
            said = (
                "num_redundant_experts 4: 12 slots for 8 experts do not divide over 5 devices but over 2, 3, 4, 6, 12; "
                "with num_redundant_experts 7 they divide over 5"
            )
            with pytest.raises(ValueError, match=said):
                await llm.scale_elastic_ep(5)
            assert await generated(llm, "after", 0) == expected[0]
    finally:
        llm.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.matrix
async def test_one_engine_becomes_two_and_one_again(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    await scaled_under_load(folder, [1, 2, 1], 2)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sizes", "redundant", "settings"),
    [
        ([2, 4, 2], 0, {}),
        ([2, 1, 2], 4, OFTEN),
        ([2, 4, 1], 0, {**OFTEN, "eplb_use_async": False}),
        ([1, 2, 1], 0, {"tensor_parallel_size": 2}),
    ],
)
async def test_more_sizes(sizes: list[int], redundant: int, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    eplb = {"num_redundant_experts": redundant} if redundant else {}
    await scaled_under_load(folder, sizes, 3, redundant, **eplb, **settings)
