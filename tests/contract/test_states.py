"""A model with layers that keep a state of each request instead of its tokens, served by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from frame import LLM, SamplingParams
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.model_loading import load_model
from frame.core.worker.start.open_device import open_device
from frame.core.worker.start.profile import profile_step
from frame.interfaces import Placement
from frame.kept_weights.holder import NoHolder
from frame.plugins.connectors.disk.worker import DiskWorker
from frame.testing import ModelSuite
from frame.testing.engines import drain, greedy, request, running, tokens_of

TIGHT = {"num_gpu_blocks_override": 18, "block_size": 8, "max_model_len": 80, "enable_prefix_caching": False}


class TestStates(ModelSuite):
    target = "tests.contract.recurrent:Recurrent"
    tags: ClassVar = {"tiny": "tests.contract.wrong_more:write_llama"}

    def reference(self, folder: Path, given: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """transformers' Llama, and the recurrence in a loop over all tokens behind it."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        found = []
        for prompt in given:
            ids = list(prompt)
            for _ in range(count):
                with torch.inference_mode():
                    state = torch.zeros(model.config.hidden_size)
                    for hidden in model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]:
                        state = hidden + 0.5 * state
                    ids.append(int(model.lm_head(state).argmax()))
            found.append(ids[len(prompt) :])
        return found

    def test_many_requests_that_are_preempted_and_computed_in_chunks_keep_their_tokens(self) -> None:
        given = self.given() * 4
        want = self.reference(self.checkpoint_folder, given[: len(given) // 4], self.num_tokens) * 4
        with self.served(**TIGHT, max_num_batched_tokens=24, max_num_seqs=5) as engine:
            assert greedy(engine, given, self.num_tokens) == want
            stats = engine.stats()
            assert stats.preemptions > 0, "the cache was to be too small for all"
            assert engine.scheduler._kv._states[1].num_free == 5, "each request gave back its state"
            assert stats.kv_usage == 0

    def test_a_prompt_goes_on_from_the_state_that_was_kept_of_its_beginning(self) -> None:
        """Of the whole prompt at first; once a second one is seen to share a part, of that part as well."""
        shared = [7] * 40 + list(range(3, 30))
        prompts = [[*shared, *tail] for tail in ([4] * 9, [5] * 20, [6] * 30, [4] * 9)]
        want = self.reference(self.checkpoint_folder, prompts, 4)
        cached = []
        with self.served(block_size=8) as engine:
            for index, prompt in enumerate(prompts):
                outputs = drain(engine, [request(f"r{index}", prompt, 4)])[f"r{index}"]
                assert tokens_of(outputs) == want[index]
                cached.append(outputs[0].num_cached)
        assert cached == [0, 0, 64, 72]

    @pytest.mark.parametrize(
        ("settings", "what"),
        [
            ({"kv_connector": "peer", "enable_prefix_caching": False}, "set enable_prefix_caching, or leave kv_conn"),
            ({"speculator": "ngram", "num_speculative_tokens": 2}, "leave the speculator out"),
            ({"deterministic": True}, "leave deterministic out"),
        ],
    )
    def test_what_a_state_cannot_do_ends_the_start(self, settings: dict[str, Any], what: str) -> None:
        with (
            pytest.raises(ValueError, match=f"layer 'model.state' keeps a running state .*{what}"),
            self.served(**settings),
        ):
            pass

    def test_a_connector_that_does_not_move_states_ends_the_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DiskWorker, "moves_states", False)
        plugin = {"disk": {"folder": str(tmp_path)}}
        config = self.model_config(kv_connector="disk").model_copy(update={"plugin": plugin})
        words = "KV connector 'disk' cannot move what 'model.state' keeps; leave it out for this model"
        with pytest.raises(ValueError, match=words), running(config, self.registry()):
            pass

    def test_the_largest_step_is_profiled_with_states_of_its_own(self) -> None:
        config, registry = self.model_config(max_num_batched_tokens=64, max_num_seqs=4), self.registry()
        opened = open_device(config, registry, Placement(), "")
        before = opened.platform.memory().snapshot()
        loaded = load_model(config, opened.checkpoint, opened.platform, registry, opened.groups, before, NoHolder())
        profile_step(config, opened.checkpoint, loaded, opened.platform)
        state = loaded.build.caches["model.state"].kv_cache
        assert state is not None
        assert state[1].any(), "the layer did its work on one row"
        assert not state[0].any()

    def test_it_runs_through_the_public_class(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Registry, "load", classmethod(lambda *given, **named: self.registry()))
        given, settings = self.given(), self.model_config()
        llm = LLM(
            model=str(self.checkpoint_folder), hf_overrides=dict(settings.model.hf_overrides), dtype="float32",
            max_model_len=128, num_gpu_blocks_override=64, skip_tokenizer_init=True,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=self.num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found == self.reference(self.checkpoint_folder, given, self.num_tokens)
