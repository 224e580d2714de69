"""What the runs of `offline_gpu.py` would take on one H200 if all their work went at the rates of its large parts.

    python benchmarks/floors.py

The rates are those of a copy, of a large product that goes on for a while, and of the best prompts' attention that was
known when the targets were set; decodes have since read keys at up to 4.56 TB/s. Each step takes the longer of its
products' operations and of the weights' bytes, then the bytes of all keys and values that its decodes read, then the
operations of its prompts' attention; nothing overlaps, all else takes no time. Steps hold every decode and prompts up
to a budget of tokens, as frame and its peers schedule them. What prompts
share is computed once, and read once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offline_gpu import MODELS, Run, drawn

BYTES, PRODUCTS, ATTENTION = 4.27e12, 690e12, 550e12  # a second
MAX_TOKENS = 8192
ITEM = 2  # bytes of bfloat16


@dataclass(frozen=True)
class Shape:
    """What of a model's configuration the floor follows from: weights in numbers, the rest in features."""

    layers: int
    dense: int
    expert: int
    num_experts: int
    experts_per_token: int
    head: int
    query: int
    key: int

    @staticmethod
    def is_known(config: dict[str, Any]) -> bool:
        """Whether its products and keys are those that are counted here: of bfloat16, with heads and gated layers."""
        return config["model_type"] in ("llama", "qwen3", "qwen3_moe") and "quantization_config" not in config

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """The shape of a configuration as config.json has it."""
        hidden, wide = config["hidden_size"], config["head_dim"]
        query, key = config["num_attention_heads"] * wide, config["num_key_value_heads"] * wide
        experts = config.get("num_experts", 0)
        feed = 3 * hidden * config["intermediate_size"]
        dense = hidden * (query + 2 * key) + query * hidden + (hidden * experts if experts else feed)
        expert = 3 * hidden * config["moe_intermediate_size"] if experts else 0
        head = hidden * config["vocab_size"]
        per_token = config.get("num_experts_per_tok", 0)
        return cls(config["num_hidden_layers"], dense, expert, experts, per_token, head, query, key)

    def products(self, rows: int, sampled: int) -> float:
        """Seconds of a step of `rows` tokens of which `sampled` get logits."""
        used = self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** rows) if self.expert else 0
        read = ITEM * (self.layers * (self.dense + used * self.expert) + self.head)
        done = 2 * (rows * self.layers * (self.dense + self.experts_per_token * self.expert) + sampled * self.head)
        return max(done / PRODUCTS, read / BYTES)

    def keys(self, tokens: int) -> float:
        """Seconds in which decodes read the keys and values of so many tokens."""
        return ITEM * 2 * self.key * self.layers * tokens / BYTES

    def prompt(self, first: int, last: int) -> float:
        """Seconds of the attention of the tokens [first, last) of a prompt to all before them."""
        return 4 * self.query * self.layers * (last**2 - first**2) / 2 / ATTENTION


def floor(config: dict[str, Any], run: Run, seed: int) -> tuple[float, float, float, int]:
    """Seconds of products, of reading keys and of prompts' attention, and tokens out."""
    shape, (prompts, wanted) = Shape.of(config), drawn(config["vocab_size"], run, seed)
    products = keys = attention = 0.0
    waiting, done = [(len(ids), left) for ids, left in zip(prompts, wanted, strict=True)], 0
    running: list[tuple[int, int]] = []  # tokens in the cache, tokens still wanted
    while waiting or running:
        tokens = sampled = len(running)
        keys += shape.keys(sum(length for length, _ in running) - run.shared * max(0, len(running) - 1))
        running = [(length + 1, left - 1) for length, left in running]
        while waiting and tokens < MAX_TOKENS:
            length, left = waiting[0]
            upto = min(length, done + MAX_TOKENS - tokens)
            attention += shape.prompt(done, upto)
            tokens, done = tokens + upto - done, upto
            if done == length:
                del waiting[0]
                running.append((length + 1, left - 1))
                sampled, done = sampled + 1, run.shared  # the first prompt has computed what all share
        products += shape.products(tokens, sampled)
        running = [(length, left) for length, left in running if left]
    return products, keys, attention, sum(wanted)


def main() -> None:
    """Prints a line for each run of each model."""
    for name, (config, _, runs) in MODELS.items():
        for run in runs if Shape.is_known(config) else ():
            *parts, out = floor(config, run, 1)
            inside = ", ".join(
                f"{part:.3f} s {kind}" for part, kind in zip(parts, ("products", "keys", "prompts"), strict=True)
            )
            print(f"{name} {run}: {sum(parts):.3f} s, {out / sum(parts):.0f} out/s ({inside})")


if __name__ == "__main__":
    main()
