"""Batch inference with Ray Data: a pool of actors, each with an engine of its own, continues the rows of a dataset.

    pip install 'frame-llm[ray]' 'ray[data]'
    python examples/ray_data.py MODEL "Once upon a time" "The capital of France is"

With `LLM(model, tensor_parallel_size=2, executor="ray")` an engine takes two devices of the cluster.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import ray.data

from frame import LLM, SamplingParams


class Continue:
    """Continues the prompts of a batch; made once in each actor."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self.llm = LLM(model=model, **settings)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(max_tokens=16, temperature=0.0)
        outputs = self.llm.generate([str(prompt) for prompt in batch["prompt"]], params, use_tqdm=False)
        return {"prompt": batch["prompt"], "answer": [output.outputs[0].text for output in outputs]}


def run(model: str, prompts: list[str], actors: int = 1, **settings: Any) -> list[dict[str, Any]]:
    """A row with prompt and answer for each prompt."""
    rows = ray.data.from_items([{"prompt": prompt} for prompt in prompts])
    pool = ray.data.ActorPoolStrategy(size=actors)
    answered = rows.map_batches(
        Continue, fn_constructor_args=(model, settings), batch_size=64, compute=pool, num_cpus=1
    )
    found: list[dict[str, Any]] = answered.take_all()
    return found


if __name__ == "__main__":
    for row in run(sys.argv[1], sys.argv[2:]):
        print(f"{row['prompt']} … {row['answer']}")
