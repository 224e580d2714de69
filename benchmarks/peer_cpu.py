"""One request on a CPU, prompt and decode: frame beside llama.cpp, on the same random weights.

    python benchmarks/peer_cpu.py FOLDER [--side frame|llama] [--threads 1] [--types float32 bfloat16 int8]

Without a side it writes the model of 168 million parameters into FOLDER, as a checkpoint and as GGUF. A side needs its
own packages alone: frame, or llama-cpp-python, which pip builds. A prompt of 512 random ids and 32 greedy tokens, the
best of three; a prompt's seconds are those to the first token, a decode's those of the others. `int8` is frame's
`--quantization int8` of the bfloat16 model, and Q8_0.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, RUNS = 512, 32, 3
GGUF = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
#: What llama.cpp must know of a model without a tokenizer.
FACTS = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": 32000}
MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def write(folder: Path) -> None:
    """Writes FOLDER/model and a GGUF file of each type."""
    import torch
    import transformers

    from tests.gguf.files import write_gguf

    torch.manual_seed(0)
    plain = folder / "model"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(plain)
    for type_, kind in GGUF.items():
        write_gguf(plain, folder / f"{type_}.gguf", [(".*", kind)], more=FACTS)


def of_frame(folder: Path, type_: str, threads: int) -> Callable[[int], float]:
    """What generates some tokens after the prompt, and returns the seconds."""
    from frame import LLM, SamplingParams

    quantised = {"quantization": "int8"} if type_ == "int8" else {}
    llm = LLM(
        model=str(folder / "model"),
        dtype="bfloat16" if quantised else type_,
        skip_tokenizer_init=True,
        max_model_len=1024,
        num_threads=threads,
        enable_prefix_caching=False,
        max_num_batched_tokens=1024,
        **quantised,
    )

    def seconds(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt()}], params, use_tqdm=False)
        return time.perf_counter() - start

    return seconds


def of_llama(folder: Path, type_: str, threads: int) -> Callable[[int], float]:
    """As `of_frame`; tokens are given rather than drawn, which takes llama.cpp no longer."""
    from llama_cpp import Llama

    path = str(folder / f"{type_}.gguf")
    llm = Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, n_batch=PROMPT, verbose=False)

    def seconds(count: int) -> float:
        llm.reset()
        start = time.perf_counter()
        llm.eval(prompt())
        for token in prompt()[1:count]:
            llm.eval([token])
        return time.perf_counter() - start

    return seconds


def prompt() -> list[int]:
    return random.Random(1).choices(range(300, 31000), k=PROMPT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--side", choices=("frame", "llama"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--types", nargs="+", choices=tuple(GGUF), default=list(GGUF))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.side is None:
        return write(arguments.folder)
    rows: list[dict[str, Any]] = []
    for type_ in arguments.types:
        seconds = {"frame": of_frame, "llama": of_llama}[arguments.side](arguments.folder, type_, arguments.threads)
        seconds(2)
        first, whole = (min(seconds(count) for _ in range(RUNS)) for count in (1, OUTPUT + 1))
        rows.append({"side": arguments.side, "type": type_, "threads": arguments.threads})
        rows[-1] |= {"prompt tok/s": round(PROMPT / first), "decode tok/s": round(OUTPUT / (whole - first), 1)}
        print(rows[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
