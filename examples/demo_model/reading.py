"""Exchanges that pick a fact out of given sentences: the answer stands in the question."""

import random

from .exchanges import Exchange, a, ask
from .facts import CITIES, COLOURS, CONTAINERS, FOODS, HOBBIES, JOBS, NAMES, OBJECTS, PETS, PLACES, SEQUENCES

SYLLABLES = ["ba", "be", "bi", "bo", "da", "de", "di", "do", "fa", "fe", "ga", "go", "ka", "ke", "ki", "ko", "la",
             "le", "li", "lo", "ma", "me", "mi", "mo", "na", "ne", "ni", "no", "pa", "po", "ra", "re", "ri", "ro",
             "sa", "se", "so", "ta", "te", "ti", "to", "va", "ve", "za", "zo", "lin", "ran", "mar", "tol", "ven",
             "dor"]  # fmt: skip


def made_up(rng: random.Random) -> str:
    """A name that nobody has, so that reading cannot lean on known names."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(2, 4))).capitalize()


def person(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up(rng)


def place(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.75 else made_up(rng)


# kind -> (values, ways to state it, questions about a person with their reply, question for the person with its reply)
TRAITS = {
    "city": (
        place,
        ("lives in {v}", "comes from {v}", "lives in {v}"),
        (("Where does {n} live?", "{n} lives in {v}."),),
        ("Who lives in {v}?", "{n} lives in {v}."),
    ),
    "age": (
        lambda rng: str(rng.randrange(3, 99)),
        ("is {v} years old", "is {v}", "is {v} years old"),
        (("How old is {n}?", "{n} is {v} years old."), ("What is the age of {n}?", "{n} is {v} years old.")),
        ("Who is {v} years old?", "{n} is {v} years old."),
    ),
    "job": (
        lambda rng: rng.choice(JOBS),
        ("is {av}", "works as {av}"),
        (
            ("What is {n}'s job?", "{n} is {av}."),
            ("What does {n} do?", "{n} is {av}."),
            ("What does {n} work as?", "{n} is {av}."),
        ),
        ("Who is {av}?", "{n} is {av}."),
    ),
    "pet": (
        lambda rng: rng.choice(PETS),
        ("has {av}", "owns {av}", "has a pet {v}"),
        (("What pet does {n} have?", "{n} has {av}."), ("Which animal does {n} have?", "{n} has {av}.")),
        ("Who has {av}?", "{n} has {av}."),
    ),
    "food": (
        lambda rng: rng.choice(FOODS),
        ("likes to eat {v}", "eats {v}", "loves to eat {v}"),
        (("What does {n} eat?", "{n} eats {v}."), ("What does {n} like to eat?", "{n} likes to eat {v}.")),
        ("Who eats {v}?", "{n} eats {v}."),
    ),
    "hobby": (
        lambda rng: rng.choice(HOBBIES),
        ("enjoys {v}", "likes {v}"),
        (("What does {n} enjoy?", "{n} enjoys {v}."), ("What is {n}'s hobby?", "{n}'s hobby is {v}.")),
        ("Who enjoys {v}?", "{n} enjoys {v}."),
    ),
    "colour": (
        lambda rng: rng.choice(COLOURS),
        ("has {av} car", "drives {av} car"),
        (("What colour is {n}'s car?", "{n}'s car is {v}."),),
        ("Who has {av} car?", "{n} has {av} car."),
    ),
}


def _fill(form: str, name: str, value: str) -> str:
    return form.format(n=name, v=value, av=a(value))


def _describe(rng: random.Random, name: str, traits: dict[str, str]) -> str:
    clauses = [_fill(rng.choice(TRAITS[kind][1]), name, value) for kind, value in traits.items()]
    if len(clauses) == 2 and rng.random() < 0.7:
        return f"{name} {clauses[0]} and {clauses[1]}."
    return " ".join([f"{name} {clauses[0]}.", *(f"{name} {clause}." for clause in clauses[1:])])


def about_people(rng: random.Random) -> Exchange:
    """One to three people with one to three traits each, and a question about one of them."""
    count = rng.choice((1, 1, 2, 2, 3))
    names: list[str] = []
    while len(names) < count:
        name = person(rng)
        if name not in names:
            names.append(name)
    kinds = rng.sample(list(TRAITS), rng.choice((1, 2, 2, 3)))
    rows: list[dict[str, str]] = []
    for _ in names:
        row = {kind: TRAITS[kind][0](rng) for kind in kinds}
        while any(row[kind] == other[kind] for other in rows for kind in kinds):
            row = {kind: TRAITS[kind][0](rng) for kind in kinds}
        rows.append(row)
    text = " ".join(_describe(rng, name, row) for name, row in zip(names, rows, strict=True))
    target, kind = rng.randrange(count), rng.choice(kinds)
    name, value = names[target], rows[target][kind]
    if count > 1 and rng.random() < 0.4:
        question, reply = TRAITS[kind][3]
        answer = name
    else:
        question, reply = rng.choice(TRAITS[kind][2])
        answer = value
    return _read(rng, text, _fill(question, name, value), _fill(reply, name, value), answer)


def about_things(rng: random.Random) -> Exchange:
    """Which thing is in which container or room."""
    count = rng.choice((1, 2, 2, 3))
    things = rng.sample(OBJECTS, count)
    if rng.random() < 0.5:
        container = rng.choice(CONTAINERS)
        spots = [f"the {colour} {container}" for colour in rng.sample(COLOURS, count)]
    else:
        spots = [f"the {room}" for room in rng.sample(PLACES, count)]
    text = " ".join(f"The {thing} is in {spot}." for thing, spot in zip(things, spots, strict=True))
    target = rng.randrange(count)
    thing, spot = things[target], spots[target]
    if rng.random() < 0.6:
        question = rng.choice(
            (f"Where is the {thing}?", f"Where can I find the {thing}?", f"In what place is the {thing}?")
        )
        return _read(rng, text, question, f"The {thing} is in {spot}.", spot)
    return _read(rng, text, f"What is in {spot}?", f"The {thing} is in {spot}.", thing)


def about_events(rng: random.Random) -> Exchange:
    """A day, an hour and a place of something that happens."""
    event = rng.choice(
        [
            "meeting",
            "party",
            "lesson",
            "concert",
            "match",
            "dinner",
            "wedding",
            "exam",
            "lecture",
            "show",
            "race",
            "picnic",
        ]
    )
    day, hour, spot = rng.choice(SEQUENCES["day"]), str(rng.randrange(1, 13)), place(rng)
    text = rng.choice((f"The {event} is on {day} at {hour} in {spot}.", f"The {event} in {spot} is on {day} at {hour}.",
                       f"The {event} takes place in {spot} on {day} at {hour}."))  # fmt: skip
    question, reply, answer = rng.choice(
        (
            (f"Where is the {event}?", f"The {event} is in {spot}.", spot),
            (f"On which day is the {event}?", f"The {event} is on {day}.", day),
            (f"What day is the {event}?", f"The {event} is on {day}.", day),
            (f"At what time is the {event}?", f"The {event} is at {hour}.", hour),
            (f"When is the {event}?", f"The {event} is on {day} at {hour}.", day),
        )
    )
    return _read(rng, text, question, reply, answer)


def _read(rng: random.Random, text: str, question: str, reply: str, answer: str) -> Exchange:
    layout = rng.random()
    if layout < 0.65:
        prompt = f"{text} {question}"
    elif layout < 0.8:
        prompt = f"{text}\n{question}"
    elif layout < 0.9:
        prompt = f"{question} {text}"
    else:
        prompt = f"Read this: {text} Now answer: {question}"
    return ask("reading", prompt, reply, key=text, answer=answer, check="contains")
