"""The demo model's tokenizer, and the token rows that training reads.

A row holds whole documents one after the other, each opened by the beginning token; bit 15 of an entry says
that the loss counts that token. Knows nothing of what the dialogues are about.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .dialogues import Conversation

BEGIN, END_OF_TEXT, PAD, END = "<|begin|>", "<|end_of_text|>", "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (BEGIN, END_OF_TEXT, PAD, END, *(f"<|{role}|>" for role in ROLES))
COUNTED = 0x8000  # set on tokens that the loss counts
VOCABULARY = 2048
MAX_LENGTH = 1024

Rows = NDArray[np.uint16]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE with every digit a token of its own, so that sums line up and any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = special_ids(tokenizer)[BEGIN]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
            ),
        ]
    )
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens; ValueError where the tokenizer is not one of `train_tokenizer`."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    if missing := [token for token, index in ids.items() if index is None]:
        raise ValueError(f"the tokenizer lacks the special tokens {', '.join(missing)}")
    return {token: index for token, index in ids.items() if index is not None}


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) for transformers."""
    template = Path(__file__).with_name("chat_template.jinja").read_text("utf-8").rstrip("\n")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[END_OF_TEXT, *(f"<|{role}|>" for role in ROLES)],
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder, save_jinja_files=False)
    # The class name that every version of transformers, and others, know.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def system_text(conversation: Conversation) -> str | None:
    """What the chat template writes in the system part: the prompt, if any, and the tools, if any."""
    first = conversation.messages[0]
    prompt = first["content"] if first["role"] == "system" else None
    if not conversation.tools:
        return prompt
    lines = [json.dumps(tool, ensure_ascii=False) for tool in conversation.tools]
    return "\n".join([f"{prompt or ''}\nTools, to be called by answering with JSON:", *lines])


class Encoder:
    """Conversations and texts as token documents with loss marks, like the chat template writes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = special_ids(tokenizer)

    def conversation_batch(self, conversations: list[Conversation]) -> list[list[int]]:
        parts: list[list[tuple[str, str]]] = []
        for conversation in conversations:
            system = system_text(conversation)
            messages = [(m["role"], m["content"]) for m in conversation.messages if m["role"] != "system"]
            parts.append(([("system", system)] if system is not None else []) + messages)
        flat = self._encode([text for part in parts for _, text in part])
        return [self._document(part, flat) for part in parts]

    def text_batch(self, texts: list[str]) -> list[list[int]]:
        begin, end = self._ids[BEGIN], self._ids[END_OF_TEXT] | COUNTED
        return [[begin, *(i | COUNTED for i in ids), end] for ids in self._encode(texts)]

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        return (e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def _document(self, parts: list[tuple[str, str]], encoded: Iterator[list[int]]) -> list[int]:
        document = [self._ids[BEGIN]]
        for role, _ in parts:
            mark = COUNTED if role == "assistant" else 0
            document.append(self._ids[f"<|{role}|>"])
            document.extend(i | mark for i in next(encoded))
            document.append(self._ids[END] | mark)
        return document


def pack(documents: list[list[int]], pad: int) -> Rows:
    """Fill rows of MAX_LENGTH with whole documents, longest first, each into the fullest row that has room.

    Documents longer than a row are left out.
    """
    order = sorted((d for d in documents if len(d) <= MAX_LENGTH), key=len, reverse=True)
    rows: list[list[int]] = []
    room_to_rows: list[list[int]] = [[] for _ in range(MAX_LENGTH + 1)]
    for document in order:
        room = next((r for r in range(len(document), MAX_LENGTH + 1) if room_to_rows[r]), None)
        if room is None:
            rows.append([])
            room, index = MAX_LENGTH, len(rows) - 1
        else:
            index = room_to_rows[room].pop()
        rows[index].extend(document)
        room_to_rows[room - len(document)].append(index)
    packed = np.full((len(rows), MAX_LENGTH), pad, np.uint16)
    for index, row in enumerate(rows):
        packed[index, : len(row)] = row
    return packed
