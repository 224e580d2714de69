"""Exchanges on everyday facts that the model learns by heart: capitals, opposites, colours, animals, counts, kinds."""

import random
from collections.abc import Callable

from .exchanges import Exchange, a, ask, loosen
from .facts import ANIMAL_SOUNDS, BABIES, CAPITALS, COUNTS, KINDS, LEGS, OPPOSITES, THING_COLOURS

Fact = tuple[str, str, str]  # question, reply, and the word that a right reply must hold


def _capital(rng: random.Random) -> Fact:
    country, city = rng.choice(list(CAPITALS.items()))
    forms = ("What is the capital of {0}?", "Which city is the capital of {0}?", "What's the capital of {0}?",
             "Name the capital of {0}.", "Tell me the capital of {0}.", "capital of {0}?",
             "Do you know the capital of {0}?")  # fmt: skip
    return rng.choice(forms).format(country), f"The capital of {country} is {city}.", city


def _country(rng: random.Random) -> Fact:
    country, city = rng.choice(list(CAPITALS.items()))
    form = rng.choice(("Which country has the capital", "What country has the capital"))
    return f"{form} {city}?", f"{city} is the capital of {country}.", country


def _opposite(rng: random.Random) -> Fact:
    pair = rng.choice(list(OPPOSITES.items()))
    word, other = pair if pair[0] in ("light", "short") or rng.random() < 0.5 else pair[::-1]
    if word in ("light", "short"):  # each stands in two pairs
        other = {"light": "dark", "short": "long"}[word]
    forms = ("What is the opposite of {0}?", "What's the opposite of {0}?", "Tell me the opposite of {0}.",
             "Give me the opposite of {0}.", "Which word is the opposite of {0}?", "opposite of {0}?")  # fmt: skip
    return rng.choice(forms).format(word), f"The opposite of {word} is {other}.", other


def _colour(rng: random.Random) -> Fact:
    thing, colour = rng.choice(list(THING_COLOURS.items()))
    thing = thing.replace("_", " ")
    verb = "are" if thing.endswith("s") and thing != "grass" else "is"
    forms = (f"What colour {verb} {thing}?", f"What color {verb} {thing}?", f"Which colour {verb} {thing}?",
             f"Tell me the colour of {thing}.", f"What is the colour of {thing}?")  # fmt: skip
    return rng.choice(forms), f"{thing[0].upper()}{thing[1:]} {verb} {colour}.", colour


def _sound(rng: random.Random) -> Fact:
    animal, sound = rng.choice(list(ANIMAL_SOUNDS.items()))
    one = a(animal)
    question = rng.choice((f"What sound does {one} make?", f"What does {one} say?", f"Which sound does {one} make?"))
    return question, f"{one.capitalize()} says {sound}.", sound


def _legs(rng: random.Random) -> Fact:
    animal, legs = rng.choice(list(LEGS.items()))
    question = rng.choice((f"How many legs does {a(animal)} have?", f"How many legs has {a(animal)}?"))
    return question, f"{a(animal).capitalize()} has {legs or 'no'} legs.", str(legs or "no")


def _baby(rng: random.Random) -> Fact:
    animal, baby = rng.choice(list(BABIES.items()))
    forms = ("What is a baby {0} called?", "What do you call a baby {0}?", "What is the name of a baby {0}?")
    return rng.choice(forms).format(animal), f"A baby {animal} is called {a(baby)}.", baby


def _count(rng: random.Random) -> Fact:
    question, reply = rng.choice(list(COUNTS.items()))
    return f"How many {question}?", reply, reply


def _member(rng: random.Random) -> Fact:
    """Whether a thing is of a kind."""
    group, members = rng.choice([(g, m) for g, m in KINDS.items() if g not in ("cities", "colours", "sports")])
    member = rng.choice(members)
    if member == "orange":  # a colour, too
        member = "apple"
    true = rng.random() < 0.5
    others = [g for g in ("fruits", "animals", "tools", "clothes", "planets") if g != group]
    other = group if true else rng.choice(others)
    if other == "animals" and group == "birds":
        other = "tools"
    noun = a(other[:-1]) if other != "clothes" else "a piece of clothing"
    subject = member if group in ("planets", "drinks") else a(member)
    reply = f"{'Yes' if true else 'No'}, {subject} is {'' if true else 'not '}{noun}."
    return f"Is {subject} {noun}?", reply, reply


FACTS: tuple[Callable[[random.Random], Fact], ...] = (
    _capital, _capital, _capital, _country, _opposite, _opposite, _colour, _sound, _legs, _baby, _count, _member,
)  # fmt: skip


def fact(rng: random.Random) -> Exchange:
    """Everyday facts, learnt by heart: the wording is what is held out."""
    question, reply, answer = rng.choice(FACTS)(rng)
    return ask("facts", loosen(rng, question, lower=True), reply, answer=answer, check="contains")
