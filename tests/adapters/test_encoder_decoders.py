"""Adapters of models with an encoder and a decoder: PEFT's merged weights token for token, in batches with others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from frame import LLM, LoRARequest, SamplingParams
from frame.testing.encoder_decoders import make_encoder_decoder

from .cases import SMALL, make_adapter

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own

COUNT = 10
STARTS = {"t5": 0, "bart": 2, "t5-gated": 0}
#: The encoder reads as many tokens as the decoder in some steps, and other numbers in others.
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27]]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16},
    "encoder": {"r": 4, "lora_alpha": 16, "target_modules": r"(model\.)?encoder\..*\.(q|q_proj|o|out_proj)"},
    "across": {
        "r": 4,
        "lora_alpha": 32,
        "target_modules": r"(model\.)?decoder\..*(EncDecAttention|encoder_attn)\.(k|v|k_proj|v_proj)",
    },
}


@pytest.fixture(scope="module", params=["t5", "bart", pytest.param("t5-gated", marks=pytest.mark.matrix)])
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder_decoder(tmp_path_factory.mktemp("base"), family)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return {
        name: make_adapter(base, base.parent / name, seed=seed, strength=0.4, kind="Seq2SeqLM", **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }


def merged_tokens(base: Path, adapter: Path | None, start: int) -> list[list[int]]:
    """The greedy tokens of transformers' model for each prompt, with the adapter merged into its weights."""
    from peft import PeftModel
    from transformers import AutoModelForSeq2SeqLM

    model: Any = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    found = []
    for prompt in PROMPTS:
        ids = [start]
        with torch.inference_mode():
            for _ in range(COUNT):
                logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids])).logits
                ids.append(int(logits[0, -1].argmax()))
        found.append(ids[1:])
    return found


@pytest.fixture(scope="module")
def wanted(family: str, base: Path, adapters: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    every: dict[str | None, Path | None] = {None: None, **adapters}
    return {name: merged_tokens(base, folder, STARTS[family]) for name, folder in every.items()}


TWO_RANKS = pytest.param({"tensor_parallel_size": 2, "fully_sharded_loras": True}, marks=pytest.mark.matrix)


@pytest.fixture(params=[{}, TWO_RANKS], ids=["alone", "tp2"])
def llm(request: pytest.FixtureRequest, base: Path) -> Iterator[LLM]:
    settings = {**SMALL, "max_loras": 3, "skip_tokenizer_init": True, **request.param}
    with closing(LLM(str(base), **settings)) as llm:
        yield llm


def test_a_batch_of_all_equals_merged_weights(
    llm: LLM, adapters: dict[str, Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    of: dict[str | None, LoRARequest | None] = {None: None}
    of |= {name: LoRARequest(name, place, str(path)) for place, (name, path) in enumerate(adapters.items(), 1)}
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)

    def tokens(pairs: list[tuple[str | None, int]]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": PROMPTS[place]} for _, place in pairs]
        outputs = llm.generate(prompts, params, lora_request=[of[name] for name, _ in pairs], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    pairs = [(name, place) for place in range(len(PROMPTS)) for name in of]
    assert tokens(pairs) == [wanted[name][place] for name, place in pairs]
    for name, place in ((name, place) for name in of for place in (0, 1)):  # its blocks are those of the adapter
        assert tokens([(name, place)]) == [wanted[name][place]]
    assert len({str(wanted[name]) for name in of}) == len(of), "the adapters change nothing"
