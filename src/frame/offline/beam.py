"""Beam search: each round generates one token after every beam, with the 2 · width most likely tokens there.

Knows requests and log-probabilities only. The prefix cache keeps a round from computing its beams again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frame.core.front.logprobs import Logprob
from frame.core.front.outputs import RequestOutput
from frame.core.interfaces.sampling import RequestOutputKind, SamplingParams
from frame.quoting import quoted

from .prompts import TokensPrompt


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """How beams grow and are ranked: by cumulative log-probability / length ** `length_penalty`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {quoted(value)}")


@dataclass
class BeamSearchSequence:
    """One beam: `tokens` are prompt and output; `text` is filled in when the search returns."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    lora_request: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearch:
    """The search for one prompt; `eos_token_ids` end a beam."""

    params: BeamSearchParams
    prompt_len: int
    eos_token_ids: frozenset[int]
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def grow(self, outputs: Sequence[RequestOutput]) -> None:
        """Extends every beam by each candidate of its next token; keeps the `beam_width` best that have not ended."""
        candidates: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            completion = output.outputs[0]
            if not completion.logprobs:  # the request failed or was aborted
                beam.finish_reason = completion.finish_reason or "error"
                self.completed.append(beam)
                continue
            best = completion.logprobs[0] or {}
            for token, logprob in best.items():
                grown = BeamSearchSequence(
                    [*beam.tokens, token], [*beam.logprobs, dict(best)], beam.cum_logprob + logprob.logprob
                )
                if token in self.eos_token_ids and not self.params.ignore_eos:
                    grown.finish_reason, grown.stop_reason = "stop", token
                    self.completed.append(grown)
                else:
                    candidates.append(grown)
        candidates.sort(key=self.score, reverse=True)
        self.beams = candidates[: self.params.beam_width]

    def score(self, beam: BeamSearchSequence) -> float:
        """The number that beams are ranked by, the best beam having the highest. Its length is without an end token."""
        length = len(beam.tokens) - self.prompt_len
        if beam.finish_reason == "stop":
            length -= 1
        return beam.cum_logprob / float(max(length, 1) ** self.params.length_penalty)

    def result(self, decode: Callable[[Sequence[int]], str] | None) -> BeamSearchOutput:
        """The best beams with their texts, whether they ended themselves or at `max_tokens`."""
        for beam in self.beams:
            beam.finish_reason = beam.finish_reason or "length"
        best = sorted([*self.completed, *self.beams], key=self.score, reverse=True)[: self.params.beam_width]
        for beam in best:
            tokens = beam.tokens[self.prompt_len :]
            if beam.finish_reason == "stop" and not self.params.include_stop_str_in_output:
                tokens = tokens[:-1]
            beam.text = None if decode is None else decode(tokens)
        return BeamSearchOutput(best)


Generate = Callable[[list[TokensPrompt], SamplingParams], list[RequestOutput]]


def search(
    searches: Sequence[BeamSearch], generate: Generate, max_model_len: int, on_round: Callable[[], None]
) -> None:
    """Runs several searches together: each round generates the next token of all their beams."""
    if not searches:
        return
    params = searches[0].params
    step = SamplingParams(
        logprobs=2 * params.beam_width,
        max_tokens=1,
        temperature=params.temperature,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for _ in range(params.max_tokens):
        live = [one for one in searches if one.beams and len(one.beams[0].tokens) < max_model_len]
        if not live:
            break
        prompts = [TokensPrompt(prompt_token_ids=beam.tokens) for one in live for beam in one.beams]
        outputs = iter(generate(prompts, step))
        for one in live:
            one.grow([next(outputs) for _ in one.beams])
        on_round()
