"""Exchanges with one right answer: sums, comparing, counting, order, and lists."""

import random

from .exchanges import Exchange, ask, join_words, loosen
from .facts import KINDS, SEQUENCES

SUM_FORMS = {
    "+": ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "How much is {a} plus {b}?",
          "Add {a} and {b}.",
          "What is {a} plus {b}?", "What's {a}+{b}?", "Calculate {a} + {b}.", "Can you add {a} and {b}?",
          "{a} + {b} ="),
    "-": ("What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "How much is {a} minus {b}?",
          "Subtract {b} from {a}.", "What is {a} minus {b}?", "What's {a}-{b}?", "Calculate {a} - {b}.", "{a} - {b} ="),
    "*": ("What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "What is {a} times {b}?", "How much is {a} times {b}?",
          "Multiply {a} by {b}.", "What is {a} x {b}?", "Calculate {a} * {b}.", "What's {a} times {b}?", "{a}*{b}"),
}  # fmt: skip


def _sum_question(rng: random.Random, sign: str, first: int, second: int) -> str:
    return loosen(rng, rng.choice(SUM_FORMS[sign]).format(a=first, b=second), lower=True)


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
    start = rng.choice((1, 1, rng.randrange(1, 70)))
    stop = start + rng.randrange(2, 12 if rng.random() < 0.7 else 31)
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
    kind, name = rng.choice((("day", "days of the week"), ("month", "months of the year"),
                             ("letter", "letters of the alphabet"),
                             ("letter", "alphabet"), ("season", "seasons"), ("planet", "planets")))  # fmt: skip
    form = rng.choice(("What are the {n}?", "List the {n}.", "Name the {n}.", "Tell me the {n}.", "Say the {n}."))
    question = loosen(
        rng, form.format(n=name) if name != "alphabet" else rng.choice(("Say the alphabet.", "What is the alphabet?"))
    )
    items = SEQUENCES[kind]
    reply = " ".join(items) + "." if kind == "letter" else f"The {name} are {join_words(items)}."
    return ask("facts", question, reply)


def listing(rng: random.Random) -> Exchange:
    """Some members of a kind; any right ones do, so a reply is not scored."""
    group, members = rng.choice(list(KINDS.items()))
    count = rng.randrange(2, 6)
    spelled = rng.choice((str(count), ("two", "three", "four", "five")[count - 2]))
    forms = (
        "Name {n} {g}.",
        "List {n} {g}.",
        "Tell me {n} {g}.",
        "Give me {n} {g}.",
        "Can you name {n} {g}?",
        "Write down {n} {g}.",
    )
    question = loosen(rng, rng.choice(forms).format(n=spelled, g=group))
    reply = join_words(rng.sample(members, count))
    return ask("listing", question, f"{reply[0].upper()}{reply[1:]}.", check="none")
