"""A speculator that knows the answers, and gets some of them wrong on purpose. For tests."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry
from frame.interfaces import DraftContext, Drafts, NewRequest, Provider, Speculator


class Oracle(Speculator):
    """`answers[prompt]` continue a prompt; each draft is right with a chance of 0.8."""

    answers: ClassVar[dict[tuple[int, ...], list[list[int]]]] = {}

    def __init__(self, setup: Any, options: Any = None) -> None:
        super().__init__(setup, options)
        self.known: dict[int, list[list[int]]] = {}

    def add(self, request: NewRequest) -> None:
        prompt = request.token_ids[: request.prompt_len].tolist()
        self.known[request.slot] = [prompt + answer for answer in self.answers.get(tuple(prompt), [])]

    def propose(self, context: DraftContext) -> Drafts:
        drafts = torch.zeros((len(context.slots), self.num_drafts), dtype=torch.int32)
        counts = torch.zeros(len(context.slots), dtype=torch.int32)
        for row, (slot, length) in enumerate(zip(context.slots.tolist(), context.lengths.tolist(), strict=True)):
            own = context.token_ids[slot, :length].tolist()
            rest = next((text[length:] for text in self.known[slot] if text[:length] == own), [])
            for place, token in enumerate(rest[: self.num_drafts]):
                wrong = hash((tuple(own[-3:]), place)) % 5 == 0
                drafts[row, place] = (token + 1) % 250 if wrong else token
                counts[row] = place + 1
        return Drafts(drafts, counts)


def registry() -> Registry:
    """What is installed, and the oracle."""
    found = Registry.load()
    target = f"{Oracle.__module__}:Oracle"
    found.offers.append(Offer("speculator", Provider("oracle", target, api=">=0.2.dev1,<0.3"), HERE, ""))
    return found
