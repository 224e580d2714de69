"""Puts exchanges together into conversations: a system prompt, tools, and up to many turns."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import calling, everyday, open_talk, reading, skills, stories, talk
from .copying import Copying
from .exchanges import Draw, Exchange, Message, draw_from
from .facts import NAMES

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "You are frame's demo model.",
    "Be kind and helpful.", "You are a helpful AI assistant.", "Answer in short sentences.",
    "You help people with small questions.",
    "You are a helpful assistant. Answer briefly.", "Be concise.",
)  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Messages (a system message first where there is one) with the tools on offer."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()


class Dialogues:
    """Draws exchanges of every task, and whole conversations of the training split."""

    def __init__(self, words: Sequence[str], topics: Sequence[str], sentences: Sequence[str]) -> None:
        copying = Copying(words)
        self.weights: dict[Draw, float] = {
            talk.greeting: 5, talk.chat: 7, talk.identity: 5, talk.refusal: 4, talk.explanation: 5, talk.favourite: 2,
            talk.remembering: 6, open_talk.Unknown(topics).draw: 10, open_talk.Statements(sentences).draw: 5,
            open_talk.poem: 2, open_talk.recipe: 1, open_talk.curious_fact: 1, skills.addition: 9,
            skills.subtraction: 9, skills.product: 4,
            skills.comparison: 2, skills.parity: 1, skills.counting: 4, skills.neighbour: 3, skills.recital: 1,
            everyday.fact: 7,
            skills.listing: 3, copying.repeat: 7, copying.repeat_often: 3, copying.first_or_last: 2, copying.spell: 4,
            reading.about_people: 14, reading.about_things: 4, reading.about_events: 3, stories.story: 6,
            calling.call: 14,
        }  # fmt: skip
        self._draws = list(self.weights)
        self._shares = list(self.weights.values())
        self._plain = [(d, w) for d, w in self.weights.items() if d is not calling.call]

    def prose(self, rng: random.Random) -> str:
        """A few replies of the training split as running text, so that plain completion knows them too."""
        draws: tuple[Draw, ...] = (
            stories.story,
            talk.explanation,
            everyday.fact,
            everyday.fact,
            skills.addition,
            skills.neighbour,
        )
        drawn = [draw_from(rng.choice(draws), rng, held_out=False) for _ in range(rng.choice((1, 1, 2, 3)))]
        return " ".join(exchange.messages[-1]["content"] for exchange in drawn)

    def _exchange(self, rng: random.Random) -> Exchange:
        return draw_from(rng.choices(self._draws, self._shares)[0], rng, held_out=False)

    def conversation(self, rng: random.Random) -> Conversation:
        """One conversation: often one turn, sometimes several, rarely many."""
        chance = rng.random()
        if chance < 0.06:
            return self._persona(rng)
        if chance < 0.14:
            return self._tools_and_talk(rng)
        first = self._exchange(rng)
        messages = list(first.messages)
        turns = rng.choice((0, 0, 0, 1, 1, 2, 3)) if chance < 0.97 else rng.randrange(6, 20)
        if not first.tools:
            for _ in range(turns):
                messages += self._plain_exchange(rng).messages
        if rng.random() < 0.25:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        return Conversation(messages, first.tools)

    def _plain_exchange(self, rng: random.Random) -> Exchange:
        draws, shares = zip(*self._plain, strict=True)
        return draw_from(rng.choices(draws, shares)[0], rng, held_out=False)

    def _tools_and_talk(self, rng: random.Random) -> Conversation:
        """Tools are on offer, but some turns need none."""
        offered = calling.offer(rng, rng.choice((1, 2, 3)))
        tools = tuple(tool for _, tool, _ in offered)
        messages: list[Message] = []
        for _ in range(rng.choice((1, 2, 3))):
            if rng.random() < 0.6:
                plain: list[Draw] = [talk.greeting, talk.chat, talk.identity, skills.addition, talk.explanation]
                messages += draw_from(rng.choice(plain), rng, held_out=False).messages
            else:
                messages += draw_from(lambda r: calling.call_one(r, offered), rng, held_out=False).messages
                if messages[-1]["content"].startswith("{"):
                    break  # a call without its result ends a conversation
        if rng.random() < 0.25:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        return Conversation(messages, tools)

    def _persona(self, rng: random.Random) -> Conversation:
        """The system prompt gives the assistant a name, and it answers by it."""
        name = rng.choice(NAMES) if rng.random() < 0.5 else reading.made_up(rng)
        system = rng.choice(
            ("You are {n}, a helpful assistant.", "Your name is {n}.", "You are called {n}.", "You are {n}.")
        )
        question = rng.choice(("What is your name?", "Who are you?", "What are you called?", "What's your name?"))
        messages = [{"role": "system", "content": system.format(n=name)}]
        if rng.random() < 0.4:
            messages += draw_from(talk.greeting, rng, held_out=False).messages
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"My name is {name}."}]
        return Conversation(messages)
