"""Completes fixed prompts with the disk connector: `python disk_prompts.py FOLDER REPEATS MODEL…` prints JSON."""

from __future__ import annotations

import json
import sys

SIZES = (90, 17, 64, 100, 5)
BLOCK_SIZE = 8
#: Prompt tokens that need no computing once all is on disk: whole blocks, short of the last token.
CACHED = [(size - 1) // BLOCK_SIZE * BLOCK_SIZE for size in SIZES]


def complete(model: str, folder: str, repeats: int = 1, **settings) -> list[list]:
    """[token ids of each prompt, prompt tokens that were not computed]; the engine has no prefix cache of its own."""
    from frame import LLM, SamplingParams

    llm = LLM(
        model=model,
        kv_connector="disk",
        plugin={"disk": {"folder": folder}},
        block_size=BLOCK_SIZE,
        max_model_len=160,
        num_gpu_blocks_override=200,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        num_threads=1,
        **settings,
    )
    prompts = [{"prompt_token_ids": [3 + (7 * i * (j + 1) + j) % 400 for i in range(n)]} for j, n in enumerate(SIZES)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    for _ in range(repeats):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    return [[list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]]


if __name__ == "__main__":
    print(json.dumps([complete(model, sys.argv[1], int(sys.argv[2])) for model in sys.argv[3:]]))
