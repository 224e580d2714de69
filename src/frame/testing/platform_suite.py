"""The contract of platforms: streams, memory, graphs, ops that mean what the references mean, and an engine on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.interfaces.model import Model
from frame.core.interfaces.platform import Platform, PlatformSpec

from .checkpoints import write_tokenizer
from .engines import SMALL, added_in_turn, every_kind, greedy, mixed_requests, prompts, running
from .platform_graphs import GraphChecks
from .platform_ops import OpChecks
from .platform_streams import StreamChecks
from .plugin_suite import reason_or_none
from .sizes import Sizes, sizes_by_argument, watched_ops
from .tiny import write_tiny

#: Of prompts: batches by which every size is met, and one of lengths that none of them has.
_LENGTHS = ((60, 3, 33, 1, 17, 48), (1,), (64, 64, 64, 64, 9, 9, 9, 9), (31, 31), (2, 2, 2), (62,) * 7, (15,), (7, 100))
_OTHER_LENGTHS = (59, 5, 34, 2, 18, 47, 98)


class PlatformSuite(StreamChecks, GraphChecks, OpChecks):
    """The contract of `frame.interfaces.Platform`.

        class TestMine(PlatformSuite):
            plugin = "mine"                     # or target = "package.module:Class"
            settings = {"attention_backend": "mine"}   # what an engine on it needs, if anything

    Everything is skipped, with `probe`'s reason, on a machine without the device.
    """

    def test_probe_says_why_and_claims_nothing(self) -> None:
        kind = self.found()
        assert reason_or_none(kind.probe(), "probe") == reason_or_none(kind.probe(), "probe")

    def test_device_is_of_its_type(self, platform: Platform) -> None:
        assert platform.device.type == platform.device_type
        assert torch.zeros(2, device=platform.device).sum().item() == 0

    def test_it_counts_devices_and_refuses_a_worker_without_room(self, platform: Platform) -> None:
        number, memory = self.found().num_devices(), platform.memory()
        assert number is None or number >= 1, f"num_devices must be None or at least 1, is {number!r}"
        now = memory.snapshot()
        assert reason_or_none(memory.lacks(now, 0.0, 0), "lacks") is None, "a worker that needs nothing has room"
        reason_or_none(memory.lacks(now, 0.0, 1 << 60), "lacks")

    def test_default_batch_sizes_allow_a_step(self) -> None:
        kind = self.found()
        for name in ("default_num_seqs", "default_num_batched_tokens"):
            size = getattr(kind, name)
            assert isinstance(size, int), f"{name} must be an int, is {size!r}"
            assert size >= 1, f"{name} must be at least 1, is {size}"

    def test_supports_gives_reasons(self, platform: Platform) -> None:
        assert self.dtypes(platform), "none of float32, bfloat16, float16 is supported"
        reason = platform.supports(PlatformSpec(torch.complex128))
        assert reason_or_none(reason, "supports"), "supports must refuse complex128"
        for spec in (PlatformSpec(torch.float32, world_size=10**6), PlatformSpec(torch.float32, deterministic=True)):
            reason_or_none(platform.supports(spec), "supports")
        for stored in (torch.float32, torch.bfloat16, torch.float16):
            chosen = platform.auto_dtype(stored)
            reason = platform.supports(PlatformSpec(chosen))
            assert reason is None, f"auto_dtype({stored}) gave {chosen}, which is not supported: {reason}"

    def test_an_engine_serves_on_it(self, platform: Platform, tmp_path: Path) -> None:
        dtype = str(self.dtypes(platform)[0]).removeprefix("torch.")
        write_tiny(tmp_path, self.architecture)
        given = prompts(512)
        settings = {**SMALL, "model": str(tmp_path), "platform": self.name, "dtype": dtype}
        with running(self.config(**settings), self.registry()) as engine:
            assert engine.info.platform == platform.device_type
            alone = [greedy(engine, [prompt])[0] for prompt in given]
            together = greedy(engine, given)
        if dtype == "float32":
            assert together == alone, "tokens depend on what a request is batched with"
        assert all(len(tokens) == 12 for tokens in together)
        if dtype == "float32":
            assert together == self.reference(tmp_path, given), "tokens differ from the transformers library's"

    def test_a_fixed_set_of_sizes_is_met(self, platform: Platform, tmp_path: Path) -> None:
        """Ops get tensors of few sizes, and requests of other lengths add no size."""
        if not self.max_sizes:
            pytest.skip("the platform takes any size")
        dtype = str(self.dtypes(platform)[0]).removeprefix("torch.")
        write_tiny(tmp_path, self.architecture)
        settings = {**SMALL, "max_num_seqs": 8, "model": str(tmp_path), "platform": self.name, "dtype": dtype}
        seen: set[tuple[Any, ...]] = set()
        with watched_ops(type(platform), seen), running(self.config(**settings), self.registry()) as engine:
            for seed, lengths in enumerate(_LENGTHS):
                mixed_requests(engine, prompts(512, lengths, seed))
            assert seen, "the engine's steps reached no op of the platform"
            before = set(seen)
            mixed_requests(engine, prompts(512, _OTHER_LENGTHS, seed=99))
            new = sorted(map(str, seen - before))
        self.check_sizes(before)
        assert not new, f"ops met sizes that no request before had: {'; '.join(new[:5])}"

    @pytest.mark.parametrize("speculator", [None, "ngram"])
    def test_whatever_is_asked_for_meets_a_fixed_set_of_sizes(
        self, platform: Platform, tmp_path: Path, speculator: str | None
    ) -> None:
        """Penalties, token rules, log-probabilities, grammars, drafts, several outputs: each in amounts of its own."""
        if not self.max_sizes:
            pytest.skip("the platform takes any size")
        dtype = str(self.dtypes(platform)[0]).removeprefix("torch.")
        write_tiny(tmp_path, self.architecture)
        write_tokenizer(tmp_path)
        settings = {**SMALL, "max_num_seqs": 8, "model": str(tmp_path), "platform": self.name, "dtype": dtype}
        if speculator is not None:
            lookup = {"method": speculator, "num_speculative_tokens": 8, "prompt_lookup_max": 2}
            settings |= {"speculative_config": lookup}
        seen: set[tuple[Any, ...]] = set()
        with watched_ops(type(platform), seen), running(self.config(**settings), self.registry()) as engine:
            for amount, lengths in enumerate((*_LENGTHS, _OTHER_LENGTHS), 1):
                given = [(prompt[:5] * 20)[: len(prompt)] for prompt in prompts(400, lengths, seed=amount)]
                added_in_turn(engine, every_kind(given, amount), amount)
        self.check_sizes(seen)

    def check_sizes(self, seen: Sizes) -> None:
        """No argument of an op has more than `max_sizes` sizes."""
        for (op, place, axis), sizes in sizes_by_argument(seen).items():
            which = f"argument {place} (axis {axis}) of op {op}"
            assert len(sizes) <= self.max_sizes, f"{which} has sizes {sorted(sizes)}"

    def reference(self, folder: Path, given: Sequence[Sequence[int]]) -> list[list[int]]:
        """What the transformers library continues each prompt with, greedily, on the CPU in float32."""
        from transformers import AutoModelForCausalLM

        from .model_suite import continue_greedily

        model: Model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return [continue_greedily(model, prompt, 12) for prompt in given]
