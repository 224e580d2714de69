"""A program for torchrun, FOLDER OUT [MODE]: the same engine in every process; each writes what it generated.

MODE: "diverge", one engine gets other requests; "stages", the layers are divided; "dies", one process is killed.
"""

import json
import os
import signal
import sys
import threading

from frame import LLM, SamplingParams
from frame.testing.engines import SMALL


def main(folder: str, out: str, mode: str = "") -> None:
    rank = int(os.environ["RANK"])
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        **{"pipeline_parallel_size" if mode == "stages" else "tensor_parallel_size": 2},
        executor="external",
        num_threads=1,
        seed=1,
        **SMALL,
    )
    prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8 * (i + 1)]} for i in range(5)]
    if mode == "diverge" and rank == 1:
        prompts.reverse()
    if mode == "dies" and rank == 1:
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
    length = 120 if mode == "dies" else 12
    params = [SamplingParams(max_tokens=length, temperature=0.0 if i % 2 else 1.0, ignore_eos=True) for i in range(5)]
    try:
        found = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
        ranks = llm.collective_rpc(lambda worker: worker.rank)
    except Exception as error:
        found, ranks = [f"{type(error).__name__}: {error}"], []
    with open(f"{out}/{rank}.json", "w", encoding="utf-8") as file:
        json.dump({"tokens": found, "ranks": ranks}, file)


main(*sys.argv[1:])
