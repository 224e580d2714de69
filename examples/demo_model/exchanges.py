"""The unit that every generator makes (one exchange), and the split into training and held-out items.

An item is held out by the hash of its key, so the two splits cannot overlap whatever the order of drawing.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Check = Literal["exact", "contains", "json", "none"]

HELD_OUT_SHARE = 20  # one key in so many is kept for evaluation


@dataclass(frozen=True)
class Exchange:
    """A question and its reply (with a tool call in between where there is one), and how to score a reply.

    `key` names what is held out: the numbers of a sum, the words to repeat, the sentence to read.
    `answer` is scored against the assistant message at `scored`, an index into `messages`.
    """

    task: str
    key: str
    messages: list[Message]
    answer: str
    check: Check
    tools: tuple[dict[str, Any], ...] = ()
    scored: int = -1


Draw = Callable[[random.Random], Exchange]


def is_held_out(exchange: Exchange) -> bool:
    digest = hashlib.blake2b(f"{exchange.task}|{exchange.key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw_from(draw: Draw, rng: random.Random, held_out: bool) -> Exchange:
    """Draw until the item belongs to the wanted split."""
    while True:
        exchange = draw(rng)
        if is_held_out(exchange) == held_out:
            return exchange


def ask(task: str, question: str, reply: str, *, key: str = "", answer: str = "", check: Check = "exact") -> Exchange:
    """A plain exchange of two messages; the key defaults to the question, the answer to the reply."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return Exchange(task, key or question, messages, answer or reply, check)


def loosen(rng: random.Random, question: str, *, lower: bool = False) -> str:
    """The same question as people type it: sometimes without capital, full stop, or with a word of politeness.

    `lower` allows all of it to be in lower case, for questions whose answer does not copy a name.
    """
    if lower and rng.random() < 0.2:
        question = question.lower()
    if "'s " in question and rng.random() < 0.1:
        question = question.replace("'s ", "s ")
    first = rng.random()
    if first < 0.08:
        question = rng.choice(("Please tell me: ", "Quick question: ", "Hey, ", "OK, ", "Now, ", "And ", "So, ")) + (
            question[0].lower() + question[1:] if not question.startswith("I ") else question
        )
    elif first < 0.2:
        question = question[0].lower() + question[1:]
    last = rng.random()
    if last < 0.15:
        question = question.rstrip("?.!")
    elif last < 0.22 and question[-1] in "?.":
        question = f"{question[:-1]}, please{question[-1]}"
    return question


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def join_words(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
