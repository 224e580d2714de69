"""Which kernels steps of requests launch that no warm-up has met: on a device that is not there, in its own process."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.engine.schedule.step_budget import resolve_budget
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import NewRequest, StepPlan, TokenMasks
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.open_device import OpenDevice
from frame.core.worker.start.trial_steps import TrialSteps, rehearse
from frame.core.worker.step.runner import Runner
from frame.interfaces import Placement
from frame.plugins.platforms.cuda.compile import rehearsal
from frame.plugins.platforms.cuda.compile.absent_cuda import AbsentCuda
from frame.plugins.platforms.cuda.compile.absent_device import absent_cuda
from frame.testing import make_setup

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10
)
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 900, "min_p": 0.1},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 1.0, "logprobs": 40, "top_p": 0.3},
    {"temperature": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": 0.3, "frequency_penalty": 0.2, "top_p": 0.9},
    {"temperature": 1.0, "prompt_logprobs": 7},
    {"temperature": 0.9, "logit_bias": {5: 1.0, 9: -1.0}},
    {"temperature": 0.0, "allowed_token_ids": [3, 4]},
    {"temperature": 1.0, "min_tokens": 3, "bad_words_token_ids": [[1], [4, 5]]},
]
LENGTHS = (1, 2, 7, 15, 16, 33, 64, 100, 130, 300, 512, 1000)


def plans(
    draw: random.Random, runner: Runner, steps: int, most: int, asked: list[dict[str, Any]]
) -> Iterator[StepPlan]:
    """Requests that come, are computed in chunks, decode, and go, at most `most` at a time; the last step ends all."""
    living: dict[int, list[int]] = {}  # slot → tokens of the prompt, tokens computed
    for step in range(steps + 1):
        gone = [slot for slot in list(living) if step == steps or draw.random() < 0.1]
        for slot in gone:
            del living[slot]
        added = []
        for slot in range(most if step < steps else 0):
            if slot not in living and draw.random() < 0.3:
                living[slot] = [draw.choice(LENGTHS), 0]
                added.append(request(runner, slot, living[slot][0], draw.choice(asked)))
        budget, rows = draw.choice((64, 500, 2048)), []
        for slot, (length, done) in sorted(living.items(), key=lambda item: item[1][1] < item[1][0]):
            count = 1 if done >= length else min(length - done, budget)
            if count > 0:
                rows.append((slot, count, done))
                living[slot][1] += count
                budget -= count
        rows.sort(key=lambda row: row[1] != 1)
        slots, counts, computed = np.array(rows, np.int32).reshape(-1, 3).T
        yield StepPlan(
            step=step,
            removed_slots=np.array(gone, np.int32),
            added=added,
            appends=[],
            slots=slots.copy(),
            num_scheduled=counts.copy(),
            num_computed=computed.copy(),
            samples=np.array([living[slot][1] >= living[slot][0] for slot in slots.tolist()], bool),
            num_drafts=np.zeros(len(slots), np.int32),
        )


def decodes(runner: Runner, most: int) -> Iterator[StepPlan]:
    """A step of each number of requests up to `most`, all of which decode."""
    nothing = np.zeros(0, np.int32)
    for count, length in [(count, length) for count in range(1, most + 1) for length in (16, 600)]:
        slots, ones = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
        added = [request(runner, slot, length, ASKED[0]) for slot in range(count)]
        for gone, new, now in ((nothing, added, count), (slots, [], 0)):
            yield StepPlan(
                step=0,
                removed_slots=gone,
                added=new,
                appends=[],
                slots=slots[:now],
                num_scheduled=ones[:now],
                num_computed=ones[:now] * (length - 1),
                samples=ones[:now] == 1,
                num_drafts=ones[:now] - 1,
            )


def request(runner: Runner, slot: int, length: int, asked: dict[str, Any]) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=f"{slot}",
        token_ids=np.arange(length, dtype=np.int32) % 3,
        prompt_len=length,
        num_computed=0,
        block_ids=[np.full(group.blocks_for(length + 100), 1, np.int32) for group in runner.layout.groups],
        params=SamplingParams(max_tokens=16, **asked),
        seed=1,
    )


def masks_of(draw: random.Random, plan: StepPlan, vocab_size: int) -> bytes:
    """Of one row in four steps, as a grammar gives them."""
    sampling = plan.slots[plan.samples]
    if not len(sampling) or draw.random() > 0.25:
        return b""
    words = np.full((1, -(-vocab_size // 32)), -1, np.int32)
    return TokenMasks(slots=sampling[:1].astype(np.int32), words=words).packed()


def late_kernels(config: dict[str, Any], settings: dict[str, Any], seed: int) -> tuple[int, list[str], bool]:
    """(kernels that the warm-up meets, names of those that steps of requests launch besides, whether it took sympy)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        flat = {"model": folder, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", **settings}
        given, registry = from_flat(flat), Registry.load()
        checkpoint = read_checkpoint(given)
        given = resolve_budget(given, checkpoint, registry)
    draw, met, late = random.Random(seed), list[str](), list[str]()
    kernels, imports_sympy = met, False

    def lacks(_: str, compile_kernel: rehearsal.Compile) -> None:
        cells = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__ or (), strict=True))
        kernels.append(cells["src"].cell_contents.name)

    run = TrialSteps.run

    def run_and_serve(self: TrialSteps) -> None:
        nonlocal kernels, imports_sympy
        run(self)
        runner = self._make()[0]
        imports_sympy = "sympy.core" in sys.modules
        kernels, most = late, given.scheduler.max_num_seqs
        lives = [(20, size, ASKED) for size in (1, 3, 9, 40, most)] + [(4, 3, [one]) for one in ASKED]
        lives += [(3, 4, draw.sample(ASKED, 2)) for _ in range(20)]
        never = opened.not_deterministic or self._chosen.not_deterministic
        for deterministic in (False,) if never else (False, True):
            for steps, size, asked in lives:
                for plan in plans(draw, runner, steps, min(size, most), asked):
                    plan.deterministic = deterministic
                    runner.execute(plan)
                    runner.sample(masks_of(draw, plan, checkpoint.vocab_size)).result()
        for plan in decodes(runner, min(most, 64)):
            runner.execute(plan)
            runner.sample().result()

    TrialSteps.run = run_and_serve  # type: ignore[method-assign]
    with absent_cuda(0, H200), rehearsal.CompileMode(lacks), torch.inference_mode():
        platform = AbsentCuda(make_setup("platform", config=given))
        opened = OpenDevice(given, registry, Placement(), "", checkpoint, platform, platform.steps(), "bfloat16")
        rehearse(opened, platform)
    return len(met), late, imports_sympy
