"""Steps whose calls are written down give the bits of those in Python, and are given up where they cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from frame import LLM, SamplingParams
from frame.interfaces import EagerGraphs, StepShape
from frame.plugins.platforms import cpu_steps
from frame.plugins.platforms.cpu_linear import packs
from frame.plugins.platforms.cpu_ops import CpuOps
from frame.plugins.platforms.cpu_steps import RecordedSteps, Recording

SIZES = {
    "vocab_size": 640, "hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
PROMPTS = [[5, 6, 7, 8] * 9, [9, 3, 4], [11] * 70]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: Any) -> Any:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    config, model = MODELS[request.param]
    torch.manual_seed(3)
    model(config(**SIZES)).save_pretrained(made)
    return made


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """(rows, part, kind) of each part of a step, and whether it was made of calls that were written down."""
    found: list[tuple[Any, bool]] = []
    run, agrees, again = RecordedSteps._run, Recording.agrees, Recording.run

    def watched(self: RecordedSteps, key: Any, work: Callable[[], Tensor]) -> Tensor:
        made: list[bool] = []
        found.append((key, False))
        return run(self, key, lambda: (made.append(True), work())[1])

    def replayed(self: Recording) -> Tensor:
        found[-1] = found[-1][0], True
        return again(self)

    monkeypatch.setattr(RecordedSteps, "_run", watched)
    monkeypatch.setattr(Recording, "run", replayed)
    monkeypatch.setattr(Recording, "agrees", lambda self, result: agrees(self, result))
    return found


def llm_of(folder: Path, threads: int = 1, **settings: Any) -> LLM:
    given = {
        "dtype": "float32",
        "max_model_len": 160,
        "num_gpu_blocks_override": 80,
        "num_threads": threads,
        **settings,
    }
    return LLM(model=str(folder), skip_tokenizer_init=True, enable_prefix_caching=False, **given)


def tokens(llm: LLM, prompts: list[list[int]], count: int = 24, **params: Any) -> list[list[int]]:
    asked = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False, **params})
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def can_be_written_down(dtype: str, threads: int = 1) -> bool:
    """Whether this machine has kernels that read packed weights."""
    native = CpuOps(compiled=True).native
    if native is None or not packs(getattr(torch, dtype)):
        return False
    weight = torch.randn(512, 512).to(getattr(torch, dtype))
    ops = CpuOps(compiled=True)
    given = ops.packed(weight)
    return (
        given is not None and ops.native is not None and ops.native.packed_linear(weight[:1], given, None) is not None
    )


@pytest.mark.parametrize(
    "settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str
)
def test_tokens_are_those_of_steps_in_python(folder, settings, threads, recorded):
    if not can_be_written_down(settings["dtype"]):
        pytest.skip("no kernels in C here")
    plain = llm_of(folder, threads, enforce_eager=True, **settings)
    want = [tokens(plain, PROMPTS[:1]), tokens(plain, PROMPTS), tokens(plain, PROMPTS[1:], temperature=0.9, seed=3)]
    assert not recorded
    del plain
    llm = llm_of(folder, threads, **settings)
    assert [tokens(llm, PROMPTS[:1]), tokens(llm, PROMPTS), tokens(llm, PROMPTS[1:], temperature=0.9, seed=3)] == want
    for rows in (1, 3):
        made = [again for key, again in recorded if key == (rows, "forward", "")]
        assert made[0] is False  # it is written down
        assert all(made[1:])
        drawn = [again for key, again in recorded if key == (rows, "draw", "greedy")]
        assert all(drawn[1:])
        assert len(drawn) > 5
    assert ((2, "forward", ""), True) in recorded


def test_weights_that_are_loaded_anew_are_the_ones_that_count(folder, tmp_path, recorded):
    if not can_be_written_down("float32"):
        pytest.skip("no kernels in C here")
    config, model = next(pair for name, pair in MODELS.items() if name in str(folder))
    torch.manual_seed(4)
    model(config(**SIZES)).save_pretrained(tmp_path)
    llm, other = llm_of(folder), llm_of(tmp_path, enforce_eager=True)
    before = tokens(llm, PROMPTS[:1])
    llm.collective_rpc("update_weights", kwargs={"model": str(tmp_path)})
    assert tokens(llm, PROMPTS[:1]) == tokens(other, PROMPTS[:1]) != before
    llm.sleep(level=1)
    llm.wake_up()
    assert tokens(llm, PROMPTS[:1]) == tokens(other, PROMPTS[:1])
    assert recorded[-1] == ((1, "draw", "greedy"), True)


SHAPE = StepShape(1, 1)


class Given:
    """A forward pass that puts `source` through a norm in C."""

    def __init__(self, ops: CpuOps, source: Tensor) -> None:
        self.ops, self.source, self.count = ops, source, 0
        self.weight = torch.ones(source.shape[-1])

    def __call__(self, step: Any = None) -> Tensor:
        self.count += 1
        return self.ops.rms_norm(self.read(), self.weight, 1e-6)

    def read(self) -> Tensor:
        return self.source


@pytest.fixture
def ops() -> CpuOps:
    made = CpuOps(compiled=True)
    if made.native is None:
        pytest.skip("no C compiler")
    return made


def test_a_step_is_made_again_once_two_were_alike(ops):
    steps, forward = RecordedSteps(ops), Given(ops, torch.randn(1, 8))
    for number in range(5):
        forward.source.copy_(torch.randn(1, 8))
        assert torch.equal(steps.run(SHAPE, "forward", forward), ops.rms_norm(forward.source, forward.weight, 1e-6))
        assert steps.captures(SHAPE, "draw") == (number > 0)
    assert forward.count == 2


def test_what_torch_computes_is_not_written_down(ops):
    steps, forward = RecordedSteps(ops), Given(ops, torch.randn(1, 8))
    for read in (lambda: forward.source + 1, lambda: torch.from_numpy(forward.source.numpy() + 1)):
        steps.drop()
        forward.read, forward.count = read, 0
        for number in range(4):
            forward.source.copy_(torch.randn(1, 8))
            want = ops.rms_norm(forward.source + 1, forward.weight, 1e-6)
            assert torch.equal(steps.run(SHAPE, "forward", forward), want)
            assert forward.count == number + 1


def test_a_step_that_gives_other_bits_again_is_given_up(ops, caplog):
    """What it read has moved since, which no operator of torch told."""
    steps, forward = RecordedSteps(ops), Given(ops, torch.randn(1, 8))
    for number in range(4):
        forward.source = torch.tensor([[1.0 + number] + [2.0] * 7])
        want = ops.rms_norm(forward.source, forward.weight, 1e-6)
        assert torch.equal(steps.run(SHAPE, "forward", forward), want)
        assert forward.count == number + 1
    assert "gave other bits" in caplog.text


def test_what_moved_is_forgotten(ops):
    steps, forward = RecordedSteps(ops), Given(ops, torch.randn(1, 8))
    for _ in range(3):
        steps.run(SHAPE, "forward", forward)
    assert forward.count == 2
    forward.weight = torch.full((8,), 2.0)
    ops.packed(torch.randn(2, 2))
    assert torch.equal(steps.run(SHAPE, "forward", forward), ops.rms_norm(forward.source, forward.weight, 1e-6))
    assert forward.count == 3
    steps.run(SHAPE, "forward", forward)
    steps.drop()
    steps.run(SHAPE, "forward", forward)
    assert forward.count == 5


@pytest.mark.parametrize(
    "shape",
    [StepShape(2, 1, max_query_len=2), StepShape(5, 5), StepShape(1, 1, deterministic=True),
     StepShape(1, 1, adapted=True), StepShape(1, 1, shared=True), StepShape(1, 1, tokens_per_rank=(1, 1))],
)  # fmt: skip
def test_other_steps_run_as_they_are(ops, shape):
    steps, forward = RecordedSteps(ops), Given(ops, torch.randn(1, 8))
    for _ in range(4):
        steps.run(shape, "forward", forward)
    assert forward.count == 4
    assert not steps.captures(shape, "draw")


def test_without_a_compiler_nothing_is_written_down(folder, monkeypatch):
    want = tokens(llm_of(folder, enforce_eager=True), PROMPTS[:1])
    monkeypatch.setattr(cpu_steps.CpuOps, "native", None)
    llm = llm_of(folder)
    graphs = llm.collective_rpc(lambda worker: type(worker.runner.device.graphs))[0]
    assert graphs is EagerGraphs
    assert len(tokens(llm, PROMPTS[:1])[0]) == len(want[0])


_SERVED = """
import sys
from frame import LLM, SamplingParams
from frame.plugins.platforms.cpu_steps import Recording
made, run = [], Recording.run
Recording.run = lambda recording: (made.append(recording), run(recording))[1]
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, num_threads=1)
llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=6, detokenize=False), use_tqdm=False)
print(bool(made), "torch._dynamo" in sys.modules)
"""


@pytest.mark.some(1)
def test_the_first_request_does_not_wait_until_torch_has_imported_its_compiler(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _SERVED, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
