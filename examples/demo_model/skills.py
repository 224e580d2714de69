"""Exchanges with one right answer: sums, repeating, counting, order, and everyday facts."""

import random

from .exchanges import Exchange, a, ask, join_words, loosen
from .facts import (
    ANIMAL_SOUNDS,
    BABIES,
    CAPITALS,
    COUNTS,
    KINDS,
    LEGS,
    OPPOSITES,
    SEQUENCES,
    THING_COLOURS,
)

SUM_FORMS = {
    "+": ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "How much is {a} plus {b}?", "Add {a} and {b}.",
          "What is {a} plus {b}?", "What's {a}+{b}?", "Calculate {a} + {b}.", "Can you add {a} and {b}?", "{a} + {b} ="),
    "-": ("What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "How much is {a} minus {b}?",
          "Subtract {b} from {a}.", "What is {a} minus {b}?", "What's {a}-{b}?", "Calculate {a} - {b}.", "{a} - {b} ="),
    "*": ("What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "What is {a} times {b}?", "How much is {a} times {b}?",
          "Multiply {a} by {b}.", "What is {a} x {b}?", "Calculate {a} * {b}.", "What's {a} times {b}?", "{a}*{b}"),
}  # fmt: skip


def _sum_question(rng: random.Random, sign: str, first: int, second: int) -> str:
    return loosen(rng, rng.choice(SUM_FORMS[sign]).format(a=first, b=second))


def addition(rng: random.Random) -> Exchange:
    first, second = (rng.randrange(10 if rng.random() < 0.15 else 100) for _ in range(2))
    reply = f"{first} + {second} = {first + second}."
    return ask("addition", _sum_question(rng, "+", first, second), reply, key=f"{first}+{second}")


def subtraction(rng: random.Random) -> Exchange:
    first, second = (rng.randrange(20 if rng.random() < 0.15 else 100) for _ in range(2))
    if first < second and rng.random() < 0.8:
        first, second = second, first
    reply = f"{first} - {second} = {first - second}."
    return ask("subtraction", _sum_question(rng, "-", first, second), reply, key=f"{first}-{second}")


def product(rng: random.Random) -> Exchange:
    """Tables up to 12: learnt by heart, so the wording is what is held out."""
    first, second = rng.randrange(13), rng.randrange(13)
    question = _sum_question(rng, "*", first, second)
    return ask("product", question, f"{first} * {second} = {first * second}.")


def comparison(rng: random.Random) -> Exchange:
    first, second = rng.sample(range(100), 2)
    word, right = rng.choice((("bigger", max(first, second)), ("smaller", min(first, second))))
    synonym = {"bigger": ("bigger", "larger", "greater"), "smaller": ("smaller", "less")}[word]
    form = rng.choice(("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "What is {w}, {a} or {b}?"))
    question = loosen(rng, form.format(w=rng.choice(synonym), a=first, b=second))
    return ask("comparison", question, f"{right} is {word}.", key=f"{word} {first} {second}")


def parity(rng: random.Random) -> Exchange:
    number = rng.randrange(1000)
    form = rng.choice(("Is {n} even or odd?", "Is {n} an odd or even number?", "Is the number {n} odd or even?"))
    reply = f"{number} is {'odd' if number % 2 else 'even'}."
    return ask("parity", loosen(rng, form.format(n=number)), reply, key=str(number))


def counting(rng: random.Random) -> Exchange:
    start = rng.choice((1, 1, rng.randrange(1, 90)))
    stop = start + rng.randrange(2, 12)
    numbers = list(range(start, stop + 1))
    if rng.random() < 0.3:
        numbers.reverse()
        form = rng.choice(("Count down from {a} to {b}.", "Count backwards from {a} to {b}."))
    else:
        form = rng.choice(("Count from {a} to {b}.", "Please count from {a} to {b}.", "Can you count from {a} to {b}?"))
        if start == 1 and rng.random() < 0.4:
            form = rng.choice(("Count to {b}.", "Please count to {b}.", "Can you count to {b}?"))
    question = loosen(rng, form.format(a=numbers[0], b=numbers[-1]))
    reply = ", ".join(map(str, numbers)) + "."
    return ask("counting", question, reply, key=f"{numbers[0]} {numbers[-1]}")


def neighbour(rng: random.Random) -> Exchange:
    kind = rng.choice(("day", "day", "month", "month", "letter", "letter", "number", "planet"))
    after = rng.random() < 0.6
    if kind == "number":
        number = rng.randrange(1, 100)
        item, other = str(number), str(number + 1 if after else number - 1)
    else:
        items = SEQUENCES[kind]
        index = rng.randrange(len(items) - 1)
        item, other = (items[index], items[index + 1]) if after else (items[index + 1], items[index])
        if kind in ("day", "month") and rng.random() < 0.1:
            item, other = (items[-1], items[0]) if after else (items[0], items[-1])
    word = "after" if after else "before"
    label = f"the letter {item}" if kind == "letter" else f"the number {item}" if kind == "number" else item
    forms = [f"What {kind} comes {word} {item}?", f"Which {kind} comes {word} {item}?", f"What comes {word} {label}?",
             f"Which {kind} is {word} {item}?", f"Tell me the {kind} {word} {item}."]  # fmt: skip
    question = loosen(rng, rng.choice(forms))
    return ask("order", question, f"{other} comes {word} {item}.")


def recital(rng: random.Random) -> Exchange:
    """The whole of a known sequence."""
    kind, name = rng.choice((("day", "days of the week"), ("month", "months of the year"), ("letter", "letters of the alphabet"),
                             ("letter", "alphabet"), ("season", "seasons"), ("planet", "planets")))  # fmt: skip
    form = rng.choice(("What are the {n}?", "List the {n}.", "Name the {n}.", "Tell me the {n}.", "Say the {n}."))
    question = loosen(rng, form.format(n=name) if name != "alphabet" else rng.choice(("Say the alphabet.", "What is the alphabet?")))
    items = SEQUENCES[kind]
    reply = " ".join(items) + "." if kind == "letter" else f"The {name} are {join_words(items)}."
    return ask("facts", question, reply)


def _fact(rng: random.Random) -> tuple[str, str, str]:
    """Question, reply and the word that a right reply must hold."""
    kind = rng.choice(("capital", "capital", "capital", "country", "opposite", "opposite", "colour", "sound", "legs", "baby",
                       "count", "member"))  # fmt: skip
    if kind in ("capital", "country"):
        country, city = rng.choice(list(CAPITALS.items()))
        forms = ("What is the capital of {0}?", "Which city is the capital of {0}?", "What's the capital of {0}?",
                 "Name the capital of {0}.", "Tell me the capital of {0}.", "capital of {0}?", "Do you know the capital of {0}?")  # fmt: skip
        if kind == "country":
            return f"{rng.choice(('Which country has the capital', 'What country has the capital'))} {city}?", \
                f"{city} is the capital of {country}.", country  # fmt: skip
        return rng.choice(forms).format(country), f"The capital of {country} is {city}.", city
    if kind == "opposite":
        pair = rng.choice(list(OPPOSITES.items()))
        word, other = pair if pair[0] in ("light", "short") or rng.random() < 0.5 else pair[::-1]
        if word in ("light", "short"):
            other = {"light": "dark", "short": "long"}[word]
        forms = ("What is the opposite of {0}?", "What's the opposite of {0}?", "Tell me the opposite of {0}.",
                 "Give me the opposite of {0}.", "Which word is the opposite of {0}?", "opposite of {0}?")  # fmt: skip
        return rng.choice(forms).format(word), f"The opposite of {word} is {other}.", other
    if kind == "colour":
        thing, colour = rng.choice(list(THING_COLOURS.items()))
        thing = thing.replace("_", " ")
        verb = "are" if thing.endswith("s") and thing != "grass" else "is"
        forms = (f"What colour {verb} {thing}?", f"What color {verb} {thing}?", f"Which colour {verb} {thing}?",
                 f"Tell me the colour of {thing}.", f"What is the colour of {thing}?")  # fmt: skip
        return rng.choice(forms), f"{thing[0].upper()}{thing[1:]} {verb} {colour}.", colour
    if kind == "sound":
        animal, sound = rng.choice(list(ANIMAL_SOUNDS.items()))
        forms = (f"What sound does {a(animal)} make?", f"What does {a(animal)} say?", f"Which sound does {a(animal)} make?")
        return rng.choice(forms), f"{a(animal).capitalize()} says {sound}.", sound
    if kind == "legs":
        animal, legs = rng.choice(list(LEGS.items()))
        forms = (f"How many legs does {a(animal)} have?", f"How many legs has {a(animal)}?")
        return rng.choice(forms), f"{a(animal).capitalize()} has {legs or 'no'} legs.", str(legs or "no")
    if kind == "baby":
        animal, baby = rng.choice(list(BABIES.items()))
        forms = (f"What is a baby {animal} called?", f"What do you call a baby {animal}?", f"What is the name of a baby {animal}?")
        return rng.choice(forms), f"A baby {animal} is called {a(baby)}.", baby
    if kind == "count":
        question, reply = rng.choice(list(COUNTS.items()))
        return f"How many {question}?", reply, reply
    group, members = rng.choice([(g, m) for g, m in KINDS.items() if g not in ("cities", "colours", "sports")])
    member = rng.choice(members)
    if member == "orange":
        member = "apple"
    true = rng.random() < 0.5
    other = group if true else rng.choice([g for g in ("fruits", "animals", "tools", "clothes", "planets") if g != group])
    if other == "animals" and group == "birds":
        other = "tools"
    noun = a(other[:-1]) if other != "clothes" else "a piece of clothing"
    subject = member if group in ("planets", "drinks") else a(member)
    reply = f"{'Yes' if true else 'No'}, {subject} is {'' if true else 'not '}{noun}."
    if group == "clothes" and true:
        reply = f"Yes, {subject} is a piece of clothing."
    return f"Is {subject} {noun}?", reply, reply


def fact(rng: random.Random) -> Exchange:
    """Everyday facts, learnt by heart: the wording is what is held out."""
    question, reply, answer = _fact(rng)
    return ask("facts", loosen(rng, question), reply, answer=answer, check="contains")


def listing(rng: random.Random) -> Exchange:
    """Some members of a kind; any right ones do, so a reply is not scored."""
    group, members = rng.choice(list(KINDS.items()))
    count = rng.randrange(2, 6)
    spelled = rng.choice((str(count), ("two", "three", "four", "five")[count - 2]))
    forms = ("Name {n} {g}.", "List {n} {g}.", "Tell me {n} {g}.", "Give me {n} {g}.", "Can you name {n} {g}?", "Write down {n} {g}.")
    question = loosen(rng, rng.choice(forms).format(n=spelled, g=group))
    reply = join_words(rng.sample(members, count))
    return ask("listing", question, f"{reply[0].upper()}{reply[1:]}.", check="none")
