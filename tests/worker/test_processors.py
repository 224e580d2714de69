"""Loading logits processors, checking requests against them, and when the sampler calls them."""

import subprocess
import sys

import pytest
import torch

from frame.core.config.model import ModelConfig
from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.logits_processors import request_check
from frame.core.plugin_host.offers import Offer, PluginError
from frame.core.plugin_host.registry import Registry
from frame.core.worker.sample.processors import RequestProcessors, load_processors
from frame.interfaces import LogitsProcessor, Provider, SamplingParams
from frame.testing import make_setup
from frame.vllm_names.dense_rows import BatchProcessorAdapter
from frame.vllm_names.processors import AdapterLogitsProcessor, BatchLogitsProcessor
from tests.worker.sampling import add, draw, make_sampler, new_request, some_logits

CPU = torch.device("cpu")
HERE = __name__


class Spy(LogitsProcessor):
    """Shifts the logits of requests with `extra_args`, and notes its calls."""

    def __init__(self, setup=None, options=None):
        super().__init__(setup or make_setup("processor"), options)
        self.calls = []

    @classmethod
    def validate(cls, params):
        if (params.extra_args or {}).get("shift", 0) < 0:
            raise ValueError("shift must not be negative")

    def add(self, slot, params, prompt_ids, output_ids):
        return bool(params.extra_args)

    def remove(self, slot):
        self.calls.append(("remove", slot))

    def apply(self, logits, slots):
        self.calls.append(("apply", list(slots)))
        return logits.roll(1, -1)


class InvariantSpy(Spy):
    argmax_invariant = True

    def apply(self, logits, slots):
        self.calls.append(("apply", list(slots)))
        return logits * 1.0


class Batch(BatchLogitsProcessor):
    def __init__(self, setup, device, is_pin_memory):
        self.given = (setup.plugin, device, is_pin_memory)

    @classmethod
    def validate_params(cls, sampling_params):
        if sampling_params.top_k == 3:
            raise ValueError("top_k 3 is not for this processor")

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits


class Adapter(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return None


class OwnApply(Adapter):
    def apply(self, logits):
        return super().apply(logits)


class Unfinished(LogitsProcessor):
    pass


def config_with(*processors):
    return FrameConfig(model=ModelConfig(logits_processors=list(processors)))


def registry_with(*names):
    offers = [
        Offer("processor", Provider(name, f"{HERE}:Spy", api=">=0.2.dev1,<0.3", preference=preference), "package", "1")
        for preference, name in enumerate(names)
    ]
    registry = Registry(offers, [])
    registry._resolved[f"{HERE}:Spy"] = Spy
    return registry


def kinds(config, registry):
    return [type(processor).__name__ for processor in load_processors(config, registry, CPU)]


def test_offered_ones_come_first_then_configured_ones(monkeypatch):
    monkeypatch.setitem(sys.modules, "spies", sys.modules[HERE])
    config = config_with(InvariantSpy, "spies:Batch", "spies.Adapter", "spies:OwnApply", InvariantSpy)
    found = load_processors(config, registry_with("one"), CPU)
    assert [type(processor) for processor in found] == [
        Spy,
        InvariantSpy,
        BatchProcessorAdapter,
        RequestProcessors,
        BatchProcessorAdapter,
    ]
    assert found[2].processor.given == ("spies:Batch", CPU, False)
    assert found[2].argmax_invariant
    assert not found[3].argmax_invariant


def test_a_configured_name_that_is_offered_loads_once():
    assert kinds(config_with("one", "package:one"), registry_with("one")) == ["Spy"]


def test_nothing_configured_is_nothing():
    assert kinds(FrameConfig(), Registry([], [])) == []


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nosuch", PluginError, "no logits processor 'nosuch'; there are: one"),
        ("no.such.module:Class", PluginError, "logits processor 'no.such.module:Class' cannot be imported"),
        ("json:nothing", PluginError, "cannot be imported from json:nothing"),
        ("json:JSONDecoder", ValueError, "is no logits processor: derive it from"),
        (int, ValueError, "is no logits processor"),
        (Unfinished, ValueError, "Unfinished lacks add, apply, remove"),
    ],
)
def test_what_cannot_be_loaded_is_named(given, error, message):
    with pytest.raises(error, match=message):
        load_processors(config_with(given), registry_with("one"), CPU)


def test_requests_are_checked_by_every_processor():
    check = request_check(config_with(Spy, Batch), Registry([], []))
    check(SamplingParams(extra_args={"shift": 1}))
    with pytest.raises(ValueError, match="shift must not be negative"):
        check(SamplingParams(extra_args={"shift": -1}))
    with pytest.raises(ValueError, match="top_k 3"):
        check(SamplingParams(top_k=3))
    with pytest.raises(ValueError, match="with 1 arguments"):
        check(SamplingParams(logits_processors=[lambda logits: logits]))
    with pytest.raises(ValueError, match="must be callables, got 3"):
        check(SamplingParams(logits_processors=[3]))


def test_checking_without_processors_imports_no_torch():
    code = (
        "import sys; from frame.core.plugin_host.logits_processors import request_check;"
        "from frame.core.config.tree import FrameConfig; from frame.core.plugin_host.registry import Registry;"
        "from frame.core.interfaces.sampling import SamplingParams;"
        "request_check(FrameConfig(), Registry([], []))(SamplingParams()); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_only_rows_that_opted_in_are_touched():
    spy = Spy()
    sampler = make_sampler(processors=[spy])
    add(
        sampler,
        *(new_request(slot, temperature=0.0, extra_args={"x": 1} if slot in (1, 3) else None) for slot in range(4)),
    )
    logits = some_logits(4)
    best = logits.argmax(-1).tolist()
    shifted = logits.roll(1, -1).argmax(-1).tolist()
    assert draw(sampler, logits, range(4), [3] * 4) == [best[0], shifted[1], best[2], shifted[3]]
    assert spy.calls == [("apply", [1, 3])]
    spy.calls.clear()
    assert draw(sampler, logits[[0, 2]], [0, 2], [4, 4]) == [best[0], best[2]]
    assert spy.calls == []
    sampler.remove(1)
    sampler.remove(0)
    assert spy.calls == [("remove", 1), ("remove", 0)]


def test_argmax_invariant_ones_are_skipped_for_greedy_rows():
    spy = InvariantSpy()
    sampler = make_sampler(processors=[spy])
    add(sampler, *(new_request(slot, temperature=float(slot == 2), extra_args={"x": 1}) for slot in range(3)))
    logits = some_logits(3)
    draw(sampler, logits[:2], [0, 1], [3, 3])
    assert spy.calls == []
    tokens = draw(sampler, logits, [0, 1, 2], [4] * 3)
    assert spy.calls == [("apply", [2])]
    plain = make_sampler()
    add(plain, *(new_request(slot, temperature=float(slot == 2)) for slot in range(3)))
    assert tokens == draw(plain, logits, [0, 1, 2], [4] * 3)


def test_callables_of_requests_see_prompt_and_output():
    calls = []

    def two(output_ids, logits):
        calls.append(("two", list(output_ids)))
        return logits

    def three(prompt_ids, output_ids, logits):
        calls.append(("three", list(prompt_ids), list(output_ids)))
        logits[:] = 0
        logits[len(output_ids)] = 1
        return logits

    sampler = make_sampler()
    add(sampler, new_request(0, (4, 5), (6,), temperature=0.0, logits_processors=[two, three]), new_request(1))
    assert draw(sampler, some_logits(2), [0, 1], [3, 3])[0] == 1
    assert calls == [("two", [6]), ("three", [4, 5], [6])]


def test_a_processor_that_changes_the_shape_is_named():
    class Cutter(Spy):
        def apply(self, logits, slots):
            return logits[:, :3]

    sampler = make_sampler(processors=[Cutter()])
    add(sampler, new_request(0, extra_args={"x": 1}))
    with pytest.raises(RuntimeError, match=r"Cutter returned \[1, 3\] for logits of \[1, 40\]"):
        draw(sampler, some_logits(1), [0], [3])
