"""An engine with the peer connector: `python peer_prompts.py MODEL ADDRESS RANKS` computes prompts, says so, waits."""

from __future__ import annotations

import sys

BLOCK_SIZE = 8
SIZES = (90, 17, 64, 5)
#: Prompt tokens that need no computing when a peer has all: whole blocks, short of the last token.
CACHED = [(size - 1) // BLOCK_SIZE * BLOCK_SIZE for size in SIZES]


def prompts() -> list[list[int]]:
    return [[3 + (7 * i * (j + 1) + j) % 400 for i in range(size)] for j, size in enumerate(SIZES)]


def make_llm(model: str, ranks: int = 1, **peer):
    """An engine without a prefix cache of its own, so that what is not computed came from a peer."""
    from frame import LLM

    settings = {"kv_connector": "peer", "plugin": {"peer": peer}} if peer else {}
    return LLM(
        model=model,
        block_size=BLOCK_SIZE,
        max_model_len=160,
        num_gpu_blocks_override=200,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        num_threads=1,
        tensor_parallel_size=ranks,
        **settings,
    )


def complete(llm, given) -> tuple[list[list[int]], list[int]]:
    """(token ids of each prompt, prompt tokens that were not computed)."""
    from frame import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], [o.num_cached_tokens for o in outputs]


if __name__ == "__main__":
    held = make_llm(sys.argv[1], int(sys.argv[3]), listen=sys.argv[2])
    complete(held, prompts())
    print("ready", flush=True)
    sys.stdin.read()
    held.close()
