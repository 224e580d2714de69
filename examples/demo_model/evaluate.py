"""Measure a trained folder on held-out items of every task, greedily, on the CPU with transformers.

    python -m examples.demo_model.evaluate --model plugins/models/demo --data .demo --items 100

Prints a Markdown table: items, right replies, and what counts as right.
"""

import argparse
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .exchanges import Exchange, draw_from
from .prepare import load_dialogues

BATCH = 50
RULES = {
    "exact": "the reply equals the expected one",
    "contains": "the reply holds the expected word",
    "json": "the reply parses to the expected call",
}


def is_right(exchange: Exchange, reply: str) -> bool:
    """Score a reply by the exchange's rule."""
    if exchange.check == "exact":
        return reply == exchange.answer
    if exchange.check == "contains":
        return re.search(rf"(?<!\w){re.escape(exchange.answer)}(?!\w)", reply, re.IGNORECASE) is not None
    try:
        return bool(json.loads(reply) == json.loads(exchange.answer))
    except json.JSONDecodeError:
        return False


class Speaker:
    """A model folder that answers conversations greedily."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._tokenizer.padding_side = "left"
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def reply(self, exchanges: list[Exchange]) -> list[str]:
        prompts = []
        for exchange in exchanges:
            index = exchange.scored % len(exchange.messages)
            tools = list(exchange.tools) or None
            prompts.append(
                self._tokenizer.apply_chat_template(
                    exchange.messages[:index], tools=tools, add_generation_prompt=True, tokenize=False
                )
            )
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            out = self._model.generate(**inputs, max_new_tokens=160, do_sample=False, temperature=None, top_p=None)
        texts: list[str] = self._tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("plugins/models/demo"))
    parser.add_argument("--data", type=Path, default=Path(".demo"))
    parser.add_argument("--items", type=int, default=100, help="held-out items of each generator")
    parser.add_argument("--show", type=int, default=2, help="wrong replies of each task to print")
    options = parser.parse_args()
    speaker, rng = Speaker(options.model), random.Random(11)
    scores: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    for draw in load_dialogues(options.data).weights:
        items = [draw_from(draw, rng, held_out=True) for _ in range(options.items)]
        for start in range(0, len(items), BATCH):
            part = [item for item in items[start : start + BATCH] if item.check != "none"]
            for exchange, reply in zip(part, speaker.reply(part) if part else [], strict=True):
                right = is_right(exchange, reply)
                scores[exchange.task, exchange.check].append(right)
                if not right:
                    asked = exchange.messages[exchange.scored % len(exchange.messages) - 1]["content"]
                    wrong[exchange.task].append(f"{asked!r} -> {reply!r}, expected {exchange.answer!r}")
    for task, lines in wrong.items():
        for line in lines[: options.show]:
            print(f"wrong {task}: {line}")
    print("\n| task | held-out items | right | counted as right when |\n|---|---|---|---|")
    for (task, check), results in scores.items():
        print(f"| {task} | {len(results)} | {sum(results) / len(results):.0%} | {RULES[check]} |")


if __name__ == "__main__":
    main()
