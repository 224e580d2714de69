"""Scores of pairs: what reaches the model."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from frame import PoolingParams
from frame.core.front.prompts import parse_prompt
from frame.core.interfaces.pooling_params import PoolingFacts
from frame.plugins.endpoints.scoring import score_texts
from frame.testing.fake_serving import FakeServing


class Crossing(FakeServing):
    @property
    def pooling(self) -> PoolingFacts:
        return PoolingFacts(tasks=["score"], size=1, labels=["fit"])


@pytest.mark.parametrize("serving", [FakeServing(), Crossing()], ids=["embeddings", "cross-encoder"])
def test_the_salt_of_a_score_reaches_every_prompt(serving: FakeServing) -> None:
    for salt in ("mine", None):
        serving.requests.clear()
        options = {"priority": 0, "cache_salt": salt}
        work = score_texts(cast(Any, serving), ["a", "b"], ["c", "d"], PoolingParams(), "name", options)
        assert len(asyncio.run(work)) == 2
        assert [parse_prompt(prompt).salt for prompt, _ in serving.requests] == [salt] * len(serving.requests)
