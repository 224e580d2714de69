"""The sampler: turns logits into tokens for the slots of a batch, and keeps what that needs by slot.

grammar masks → token rules → logits processors → penalties → temperature → argmax-invariant processors → filters and
draw → log-probabilities → counts. A greedy batch without any of it is one argmax. Where ranks divide the vocabulary,
each edits its part, and only rows with processors, filters or log-probabilities are gathered. Knows no scheduling and
no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...interfaces.logits import LogitsProcessor
from ...interfaces.step import NewRequest, TokenMasks
from ..device import Device
from .draws import Ahead, LogprobGroup, LogprobTensors, Sampled
from .need import EDITS, MORE, ONE_ROW, WHOLE_ROW, Need
from .processors import ProcessorSlots
from .sampling_slots import BatchParameters, DrawParameters, SamplingSlots
from .shards import StepRows, WholeVocabulary


class Sampler:
    """Draws tokens. One per worker; `sample` calls follow one another in step order.

    Everything that a draw changes (counts, tails) stays on the device, so that the next step sees it before the host
    does. `processors` are called in the order given.
    """

    def __init__(
        self,
        device: Device,
        max_slots: int,
        vocab_size: int,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[LogitsProcessor] = (),
        vocabulary: WholeVocabulary | None = None,
    ) -> None:
        self.vocabulary = vocabulary or WholeVocabulary(device.ops)
        self._part = self.vocabulary.part(vocab_size)
        self.logprobs_mode = logprobs_mode
        self.vocab_size = vocab_size
        self._raw = logprobs_mode.startswith("raw")
        self._normalize = logprobs_mode.endswith("logprobs")
        self._device = device
        self._ops = device.ops
        self._slots = SamplingSlots(device, max_slots, self._part)
        self._processors = ProcessorSlots(max_slots, processors, device.device)

    def add(self, request: NewRequest) -> None:
        """A request takes its slot; whatever was there is gone.

        Raises `ValueError` when its parameters name ids outside the vocabulary.
        """
        self._slots.add(request, self._processors.add(request))

    def remove(self, slot: int) -> None:
        """The request left its slot; an empty slot is fine."""
        self._slots.remove(slot)
        self._processors.remove(slot)

    def apply_staged_writes(self) -> None:
        """Sends what the requests added since the last call need on the device."""
        self._slots.apply_staged_writes()

    def needs_host_tokens(self, host_slots: np.ndarray) -> bool:
        """Whether a processor of one of these slots reads output ids, so that `deliver` must be up to date."""
        return self._processors.needs_output_ids(host_slots)

    @property
    def takes_tokens(self) -> bool:
        """Whether `deliver` would do something with any token."""
        return self._processors.active

    def deliver(self, host_slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Tokens [N] of slots [N] reached the host; called once for each, in step order."""
        self._processors.deliver(host_slots, token_ids)

    def draws_plainly(self, host_slots: np.ndarray) -> bool | None:
        """Whether the draw of a batch is random (else all greedy); None where a row asks for more than a temperature.

        `plain_parameters` then has what the draw takes.
        """
        need = self._slots.batch(host_slots).need
        return None if need & MORE else bool(need)

    def plain_parameters(self, rows: int) -> tuple[Tensor, Tensor]:
        """Temperature and random stream of the first `rows` rows of the newest random batch, at fixed addresses."""
        return self._slots.temperatures[:rows], self._slots.random_streams[:rows]

    def memory(self) -> dict[str, Tensor]:
        """The tensors that a captured draw reads, by name."""
        return {"temperature": self._slots.temperatures, "random streams": self._slots.random_streams}

    def draws_alone(self, host_slots: np.ndarray, masks: bytes = b"") -> np.ndarray:
        """bool [N]: the slots that may have one row only, as processors or masks depend on the token before it."""
        alone: np.ndarray = (self._slots.needs[host_slots] & ONE_ROW) != 0
        if masks:
            alone |= np.isin(host_slots, TokenMasks.unpacked(masks).slots)
        return alone

    def remember(self, token_ids: Tensor, counts: Tensor, host_slots: np.ndarray) -> None:
        """Records the tokens that slots [S] kept after a draw with `ahead`: the first `counts[i]` of `token_ids[i]`."""
        self._slots.penalties.count_several(token_ids, host_slots)
        self._slots.rules.extend_several(token_ids, counts, host_slots)

    def sample(
        self,
        logits: Tensor,
        host_slots: np.ndarray,
        lengths: Tensor,
        masks: bytes = b"",
        ahead: Ahead | None = None,
    ) -> Sampled:
        """Draws one token a row. Row i of `logits` float [N, V], or of a rank's part, is of slot `host_slots[i]`,
        rows behind the last slot are padding. The logits may be overwritten.

        `lengths` int [N] are the tokens that each row knows so far, which is the position of the token being drawn;
        `masks` packed `TokenMasks` or empty. With drafts `ahead` a slot may have several rows, unless it
        `draws_alone`, and the caller must call `remember` with the tokens that were kept.
        """
        host_slots = _padded(host_slots, len(logits))
        batch = self._slots.batch(host_slots)
        if not batch.need and not masks:
            return Sampled(*self.vocabulary.best(logits))
        lengths = lengths.long()
        edited = bool(masks or batch.need & EDITS)
        if edited or (batch.need & MORE and not self.vocabulary.is_divided):
            logits = logits.float()  # a plain draw widens as it reads, and rows are gathered as they are
        raw = self._raw and edited
        kept = [self.vocabulary.whole(logits, group.index) if raw else None for group in batch.logprobs]
        if masks:
            self._apply_masks(self.vocabulary.columns(logits), host_slots, masks)
        if batch.need & EDITS:
            logits = self._edit(logits, host_slots, lengths, batch, ahead)
        whole = StepRows(self.vocabulary, logits)
        token_ids, drawn = self._draw(logits, whole, host_slots, lengths, batch)
        logprobs = [
            self._logprobs(group, whole.at(group.rows, group.index) if one is None else one, token_ids, batch)
            for group, one in zip(batch.logprobs, kept, strict=True)
        ]
        if ahead is None and batch.penalties is not None:
            self._slots.penalties.count(token_ids, batch.penalties)
        if ahead is None and batch.rules is not None:
            self._slots.rules.extend(token_ids, batch.rules)
        return Sampled(token_ids, drawn, logprobs)

    def _apply_masks(self, logits: Tensor, host_slots: np.ndarray, masks: bytes) -> None:
        given = TokenMasks.unpacked(masks)
        slots, words = given.slots, given.words
        if np.array_equal(slots, host_slots):
            rows = np.arange(len(slots))
        else:
            row_of = {slot: row for row, slot in enumerate(host_slots.tolist())}
            places = [place for place, slot in enumerate(slots.tolist()) if slot in row_of]
            rows = np.array([row_of[slot] for slot in slots[places].tolist()], np.int64)
            words = words if len(places) == len(slots) else words[places]
        if len(rows):
            staged = self._device.stage_padded("rows", rows, -1)
            words = self._part.words(words)
            self._ops.apply_bitmask(logits, staged, self._device.stage_padded("rows", words, axis=0))

    def _edit(
        self,
        logits: Tensor,
        host_slots: np.ndarray,
        lengths: Tensor,
        batch: BatchParameters,
        ahead: Ahead | None,
    ) -> Tensor:
        columns = self.vocabulary.columns
        if batch.rules is not None:
            self._slots.rules.apply(columns(logits), lengths, batch.rules, ahead)
        if batch.need & Need.PROCESSORS:
            logits = self._process(logits, host_slots, batch)
        if batch.penalties is not None:
            self._slots.penalties.apply(columns(logits), batch.penalties, ahead)
        return logits

    def _process(self, logits: Tensor, host_slots: np.ndarray, batch: BatchParameters) -> Tensor:
        """Runs the processors that may change the argmax: on whole rows, of which each rank takes its part back."""
        if not self.vocabulary.is_divided:
            return self._processors.apply(logits, host_slots, invariant=False)
        rows = self._device.padded("rows", np.flatnonzero(batch.needs & Need.PROCESSORS))
        index = self._device.streams.stage(rows)
        whole = self.vocabulary.whole(logits, index)
        whole = self._processors.apply(whole, host_slots[rows], invariant=False)
        start = self._part.start
        self.vocabulary.columns(logits).index_copy_(0, index, whole[:, start : start + self._part.size])
        return logits

    def _draw(
        self, logits: Tensor, whole: StepRows, host_slots: np.ndarray, lengths: Tensor, batch: BatchParameters
    ) -> tuple[Tensor, Tensor]:
        """(tokens, logits) of all rows; from whole rows where a rank's part does not tell what is kept."""
        draw, vocabulary = batch.draw, self.vocabulary
        if draw is None:
            return vocabulary.best(logits)
        if not vocabulary.is_divided:
            return self._draw_whole(logits, host_slots, lengths, batch.needs, draw)
        chosen = np.flatnonzero((batch.needs & Need.RANDOM) * (batch.needs & WHOLE_ROW))
        if not len(chosen):
            return vocabulary.best(logits, draw.temperature, draw.streams, lengths)
        rows = self._device.padded("rows", chosen)
        index = self._device.streams.stage(rows)
        if len(chosen) == len(logits):
            return self._draw_whole(whole.at(chosen, index), host_slots, lengths, batch.needs, draw)
        tokens, drawn = vocabulary.best(logits, draw.temperature, draw.streams, lengths)
        some = host_slots[rows], lengths.index_select(0, index), batch.needs[rows], draw.of(index)
        found = self._draw_whole(whole.at(chosen, index), *some)
        return tokens.index_copy(0, index, found[0]), drawn.index_copy(0, index, found[1])

    def _draw_whole(
        self, logits: Tensor, host_slots: np.ndarray, lengths: Tensor, needs: np.ndarray, draw: DrawParameters
    ) -> tuple[Tensor, Tensor]:
        """(tokens, logits) drawn from whole rows."""
        scores, temperature = logits, draw.temperature
        if np.bitwise_or.reduce(needs) & Need.INVARIANT_PROCESSORS:
            random = temperature > 0
            scores = logits / torch.where(random, temperature, 1.0)[:, None]
            asked = (needs & Need.RANDOM) != 0
            scores = self._processors.apply(scores, host_slots, invariant=True, rows=asked)
            temperature = random.float()
        token_ids = self._ops.draw(scores, temperature, draw.streams, lengths, *draw.filters())
        return token_ids, scores.gather(-1, token_ids.long()[:, None]).squeeze(-1).float()

    def _logprobs(
        self, group: LogprobGroup, logits: Tensor, token_ids: Tensor, batch: BatchParameters
    ) -> LogprobTensors:
        """Of the group's whole rows, `logits`."""
        part = logits if self._raw else self._processed(logits, group.index, batch)
        drawn = token_ids.index_select(0, group.index)
        ids, values, ranks = self._ops.top_logprobs(part, drawn, group.width, self._normalize)
        return LogprobTensors(group, ids, values, ranks)

    def _processed(self, logits: Tensor, index: Tensor, batch: BatchParameters) -> Tensor:
        """Logits as they were drawn from: random rows with temperature and filters, greedy ones without."""
        if batch.draw is None:
            return logits
        temperature = batch.draw.temperature.index_select(0, index)
        scores = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        threshold = self._ops.keep_threshold(scores, *batch.draw.filters(index))
        return scores.masked_fill(scores < threshold[:, None], -torch.inf)


def _padded(host_slots: np.ndarray, rows: int) -> np.ndarray:
    """With -1 for the rows behind the last slot, which are padding."""
    missing = rows - len(host_slots)
    return np.append(host_slots, np.full(missing, -1, host_slots.dtype)) if missing > 0 else host_slots
