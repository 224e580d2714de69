"""The contract of logits processors, whether written for frame or for a dense batch."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.interfaces.logits import LogitsProcessor
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import NewRequest
from frame.core.plugin_host.registry import Registry
from frame.core.worker.sample.processors import ProcessorSlots, load_processors

from .plugin_suite import PluginSuite

_VOCAB = 64
_SLOTS = 8
_PROMPT = (3, 5, 8)


class LogitsProcessorSuite(PluginSuite):
    """The contract of `frame.interfaces.LogitsProcessor` (and of vLLM-style classes, through frame's adapter).

        class TestBoost(LogitsProcessorSuite):
            plugin = "boost"                           # or target = "package.module:Class"

            def params(self) -> SamplingParams:        # a request that opts in
                return SamplingParams(extra_args={"boost": [3, 2.0]})

    Without `params`, the provider's tag "extra_args" (JSON) is what a request brings to opt in.
    """

    kind = "processor"
    vocab_size = _VOCAB
    device = torch.device("cpu")

    def params(self) -> SamplingParams:
        """The parameters of a request that opts in."""
        tag = self.provider().tags.get("extra_args")
        return SamplingParams(extra_args=json.loads(tag) if tag else None)

    def other_params(self) -> SamplingParams:
        """The parameters of a request that does not opt in."""
        return SamplingParams()

    def processor(self) -> LogitsProcessor:
        """A new processor, adapted when it was written for a dense batch."""
        kind = self.found()
        if issubclass(kind, LogitsProcessor):
            made: LogitsProcessor = self.make(device=self.device)
            return made
        (adapted,) = load_processors(self.config(logits_processors=[kind]), Registry([], []), self.device)
        return adapted

    def slots(self) -> ProcessorSlots:
        """A new processor as the sampler uses it: only rows that opted in reach it."""
        return ProcessorSlots(_SLOTS, [self.processor()], self.device)

    def request(self, slot: int, params: SamplingParams, output: tuple[int, ...] = ()) -> NewRequest:
        """A request that enters `slot`, with tokens that it had generated before a preemption."""
        return NewRequest(
            slot=slot,
            request_id=f"request-{slot}",
            token_ids=np.array([*_PROMPT, *output], np.int32),
            prompt_len=len(_PROMPT),
            num_computed=0,
            block_ids=[],
            params=params,
            seed=slot,
        )

    def logits(self, rows: int, seed: int = 0) -> Tensor:
        """Random float32 logits [rows, vocab_size]."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(rows, self.vocab_size, generator=generator) * 3).to(self.device)

    def applied(self, slots: ProcessorSlots, logits: Tensor, of: list[int]) -> Tensor:
        """The logits of slots `of` after every processor."""
        indices = np.array(of, np.int32)
        logits = slots.apply(logits.clone(), indices, invariant=False)
        return slots.apply(logits, indices, invariant=True)

    def opted_in(self, output: tuple[int, ...] = ()) -> Tensor:
        """What one row that opted in becomes; skips when nothing is known that opts in."""
        slots = self.slots()
        slots.add(self.request(0, self.params(), output))
        before = self.logits(1)
        after = self.applied(slots, before, [0])
        if not output and not self.processor().needs_output_ids and torch.equal(before, after):
            pytest.skip("params() changes no logit at the first token: override it with a request that opts in")
        return after

    def test_validate_refuses_with_value_errors_only(self) -> None:
        kind: Any = self.found()
        validate = getattr(kind, "validate", None) or kind.validate_params
        validate(self.params())
        validate(self.other_params())
        tag = self.provider().tags.get("extra_args")
        names = list(json.loads(tag)) if tag else list(self.params().extra_args or ())
        for name in names:
            wrong: Any
            for wrong in ("nonsense", -(10**12), {"a": []}, [None], float("nan")):
                with contextlib.suppress(ValueError):
                    validate(SamplingParams(extra_args={name: wrong}))

    def test_add_says_whether_a_request_opted_in(self) -> None:
        processor = self.processor()
        for slot, params in enumerate((self.params(), self.other_params())):
            opted: Any = processor.add(slot, params, list(_PROMPT), [])
            assert isinstance(opted, (bool, np.bool_)), f"add must return a bool, returned {opted!r}"

    def test_every_slot_may_be_removed(self) -> None:
        processor = self.processor()
        processor.remove(3)
        processor.add(0, self.other_params(), list(_PROMPT), [])
        processor.remove(0)
        processor.remove(0)
        processor.add(0, self.params(), list(_PROMPT), [])
        processor.remove(0)

    def test_results_keep_shape_and_are_numbers(self) -> None:
        after = self.opted_in()
        assert after.shape == (1, self.vocab_size), f"apply must keep the shape, gave {list(after.shape)}"
        assert after.dtype == torch.float32, f"apply must give float32, gave {after.dtype}"
        assert not torch.isnan(after).any(), "apply made NaN"
        assert not torch.isposinf(after).any(), "apply made +inf"
        assert not torch.isneginf(after).all(), "apply left no token that can be drawn"

    def test_only_rows_that_opted_in_change(self) -> None:
        want = self.opted_in()
        slots = self.slots()
        slots.add(self.request(0, self.other_params()))
        slots.add(self.request(1, self.params()))
        slots.add(self.request(2, self.other_params()))
        rows = self.logits(1).expand(3, -1)
        after = self.applied(slots, rows, [2, 1, 0])
        assert torch.equal(after[0], rows[0]), "a row that did not opt in was changed"
        assert torch.equal(after[2], rows[2]), "a row that did not opt in was changed"
        torch.testing.assert_close(after[1], want[0], msg="a row depends on what is beside it")

    def test_rows_do_not_depend_on_their_order(self) -> None:
        self.opted_in()
        slots = self.slots()
        for slot in range(4):
            slots.add(self.request(slot, self.params()))
        rows = self.logits(4, seed=1)
        together = self.applied(slots, rows, [0, 1, 2, 3])
        for order in ([3, 2, 1, 0], [2], [1, 3]):
            index = torch.tensor(order, device=self.device)
            again = self.applied(slots, rows[index], order)
            torch.testing.assert_close(again, together[index], msg=f"rows {order} differ from the same in one batch")

    def test_a_reused_slot_starts_anew(self) -> None:
        want = self.opted_in()
        slots = self.slots()
        slots.add(self.request(0, self.params(), (1, 2)))
        self.applied(slots, self.logits(1, seed=2), [0])
        slots.remove(0)
        slots.add(self.request(0, self.other_params()))
        rows = self.logits(1)
        assert torch.equal(self.applied(slots, rows, [0]), rows), "state of the request before is left in the slot"
        slots.add(self.request(0, self.params()))  # without a remove: whatever was there is gone
        torch.testing.assert_close(self.applied(slots, rows, [0]), want, msg="a reused slot differs from a new one")

    def test_a_resumed_request_continues_as_if_it_had_stayed(self) -> None:
        output = (7, 9, 7)
        self.opted_in(output)
        stayed, resumed = self.slots(), self.slots()
        stayed.add(self.request(0, self.params()))
        for seed, token in enumerate(output):
            self.applied(stayed, self.logits(1, seed=seed), [0])
            stayed.deliver(np.array([0], np.int32), np.array([token], np.int32))
        resumed.add(self.request(0, self.params(), output))
        rows = self.logits(1, seed=9)
        torch.testing.assert_close(
            self.applied(resumed, rows, [0]),
            self.applied(stayed, rows, [0]),
            msg="after a preemption the request's logits differ (output ids are handed to add)",
        )

    def test_it_keeps_the_most_likely_token_when_it_says_so(self) -> None:
        if not self.processor().argmax_invariant:
            pytest.skip("it does not claim to be argmax-invariant")
        slots = self.slots()
        for slot in range(_SLOTS):
            slots.add(self.request(slot, self.params()))
        for seed in range(20):
            rows = self.logits(_SLOTS, seed=seed)
            after = self.applied(slots, rows, list(range(_SLOTS)))
            assert torch.equal(after.argmax(-1), rows.argmax(-1)), "argmax_invariant is set, but the best token changed"
