"""A program for torchrun, FOLDER OUT [DIVERGE]: the same engine in every process; each writes what it generated."""

import json
import os
import sys

from frame import LLM, SamplingParams
from frame.testing.engines import SMALL


def main(folder: str, out: str, diverge: str = "") -> None:
    rank = int(os.environ["RANK"])
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        executor="external",
        num_threads=1,
        seed=1,
        **SMALL,
    )
    prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8 * (i + 1)]} for i in range(5)]
    if diverge and rank == 1:
        prompts.reverse()
    params = [SamplingParams(max_tokens=12, temperature=0.0 if i % 2 else 1.0, ignore_eos=True) for i in range(5)]
    try:
        found = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
        ranks = llm.collective_rpc(lambda worker: worker.rank)
    except Exception as error:
        found, ranks = [f"{type(error).__name__}: {error}"], []
    with open(f"{out}/{rank}.json", "w", encoding="utf-8") as file:
        json.dump({"tokens": found, "ranks": ranks}, file)


main(*sys.argv[1:])
