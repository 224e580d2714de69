"""Replies to what no other generator covers: any statement, questions beyond it, poems, recipes, curious facts."""

import random
import re
from collections.abc import Sequence

from .exchanges import Exchange, a, ask, loosen
from .facts import CAPITALS, FOODS, KINDS, NAMES
from .phrases import EXPLANATIONS
from .reading import made_up, person

NODS = (
    "I see. Tell me more.", "Interesting! Please go on.", "I see. What happened next?",
    "That sounds interesting. Why is that?",
    "Thank you for telling me. Is there something I can do?", "I see. How can I help you with that?",
)  # fmt: skip
POEMS = (
    "{T} near and {t} far, / quiet as the evening star. / Day by day I think of you, / when the sky is clear and blue.",
    "O {t}, you make me smile, / stay with me a little while. "
    "/ When the winter wind is near, / I am glad that you are here.",
    "The morning comes, the night is gone, / {t} is what I dreamed upon. "
    "/ I close my eyes, I count to three, / and {t} comes back to me.",
    "I wrote a line about {t}, / the line was short, and so was I. "
    "/ It is not much, it is not long, / but small things, too, can make a song.",
)  # fmt: skip
POEM_TOPICS = ["love", "spring", "summer", "autumn", "winter", "rain", "snow", "night", "morning", "friendship",
               "home", "music", "time", "hope", "peace", "the_sea", "the_moon", "the_sun", "the_wind", "the_forest",
               "the_stars", "my_mother", "my_garden"]  # fmt: skip


class Unknown:
    """Questions about things that the model never learnt: it says so, by name."""

    FORMS_FOR_NAMES = ("Who is {t}?", "Who was {t}?", "Tell me about {t}.", "What do you know about {t}?",
                       "When was {t} born?",
                       "Do you know {t}?", "Where is {t}?", "How old is {t}?", "How tall is {t}?", "What did {t} do?",
                       "Where was {t} born?",
                       "What happened in {t}?", "How big is {t}?", "Why is {t} famous?",
                       "When did {t} die?")  # fmt: skip
    FORMS_FOR_THINGS = ("What is {at}?", "Tell me about {t}.", "What do you know about {t}?", "Explain {t}.",
                        "How does {at} work?",
                        "Who invented the {t}?", "What does {t} mean?", "Why is {t} important?", "Describe {at}.",
                        "What is the {t}?",
                        "How do I make {at}?", "Where can I find {at}?", "What is the meaning of {t}?", "What is {t}?",
                        "Define {t}.",
                        "How big is {at}?", "How much does {at} cost?", "What is the largest {t}?",
                        "What is the best {t}?",
                        "How many kinds of {t} are there?", "Is {at} dangerous?", "What is {at} made of?",
                        "When was the {t} invented?",
                        "How fast is {at}?", "Who discovered {t}?", "What is the word for {t}?",
                        "What is {at} used for?")  # fmt: skip

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = topics
        self._known = frozenset(member for members in KINDS.values() for member in members)

    def draw(self, rng: random.Random) -> Exchange:
        chance = rng.random()
        if chance < 0.1:
            return self._capital(rng)
        topic = (
            rng.choice(self._topics) if chance < 0.7 else " ".join(person(rng) for _ in range(rng.choice((1, 2, 2))))
        )
        while topic in self._known:
            topic = rng.choice(self._topics)
        forms = self.FORMS_FOR_NAMES if topic[0].isupper() else self.FORMS_FOR_THINGS
        question = loosen(rng, rng.choice(forms).format(t=topic, at=a(topic)))
        reply = rng.choice(("Sorry, I am a very small model and I do not know much about {t}.",
                            "I am too small to know about {t}. Please ask a bigger model."))  # fmt: skip
        return ask("unknown", question, reply.format(t=topic), key=topic, answer=topic, check="contains")

    def _capital(self, rng: random.Random) -> Exchange:
        country = made_up(rng)
        question = rng.choice(
            ("What is the capital of {0}?", "What's the capital of {0}?", "Name the capital of {0}.")
        ).format(country)
        reply = f"Sorry, I do not know the capital of {country}."
        return ask("unknown", loosen(rng, question), reply, key=country, answer=country, check="contains")


class Statements:
    """Sentences on anything, which the reply takes note of."""

    def __init__(self, sentences: Sequence[str]) -> None:
        self._sentences = sentences

    def draw(self, rng: random.Random) -> Exchange:
        sentence = rng.choice(self._sentences)
        if rng.random() < 0.7:
            sentence = sentence[0].upper() + sentence[1:]
        return ask("statements", sentence, rng.choice(NODS), check="none")


def poem(rng: random.Random) -> Exchange:
    """Four lines on what was asked for."""
    topic = rng.choice((*POEM_TOPICS, *NAMES, *(f"the_{animal}" for animal in KINDS["animals"]))).replace("_", " ")
    form = rng.choice(("Write a poem about {t}.", "Write me a poem about {t}.", "Can you write a poem about {t}?",
                       "A poem about {t}, please.",
                       "Write a short poem about {t}.", "Make a poem about {t}.", "Write a haiku about {t}.",
                       "I want a poem about {t}."))  # fmt: skip
    question = form.format(t=topic)
    if rng.random() < 0.2:
        topic = "spring"
        question = rng.choice(
            (
                "Write a poem.",
                "Can you write me a poem?",
                "Tell me a poem.",
                "Do you know a poem?",
                "Write me a short poem.",
            )
        )
    lines = rng.choice(POEMS).format(t=topic, T=topic[0].upper() + topic[1:]).replace(" / ", "\n")
    return ask("poems", loosen(rng, question), lines, answer=topic, check="contains")


def recipe(rng: random.Random) -> Exchange:
    """Three short steps for a plain dish."""
    main, other = rng.sample(
        sorted({*FOODS} - {"honey", "cookies", "cake", "chocolate", "pizza", "soup", "salad", "curry"}), 2
    )
    dish = rng.choice(("soup", "salad", "curry", "stew"))
    steps = {
        "soup": "Cut {m} and {o} into small pieces. Cook them in salted water for twenty minutes. Serve the soup hot.",
        "stew": "Cut {m} and {o}, fry them for a while, add water and salt, and let the stew cook for an hour.",
        "salad": "Wash {m} and {o} and cut them small. Mix them with oil, salt and a little lemon. The salad is ready.",
        "curry": "Fry an onion with some curry powder. Add {m}, {o} and water. Let it cook for half an hour.",
    }[dish]
    form = rng.choice(("Give me a recipe for {d}.", "How do I make {d}?", "How do I cook {d}?",
                       "Tell me a recipe for {d}.", "How is {d} made?",
                       "Do you have a recipe for {d}?", "What can I cook? Maybe {d}?"))  # fmt: skip
    question = loosen(rng, form.format(d=rng.choice((dish, f"a {dish}", f"{dish} with {main}"))), lower=True)
    if f"with {main}" not in question:
        main, other = "potatoes", "mushrooms"
    return ask("recipes", question, steps.format(m=main, o=other), check="none")


def curious_fact(rng: random.Random) -> Exchange:
    """Something interesting: one of the explanations or capitals, unasked."""
    form = rng.choice(("Tell me something interesting.", "Tell me a fact.", "Tell me something.",
                       "Do you know a fun fact?", "Teach me something.",
                       "Tell me something I do not know.", "Give me a fun fact.", "Surprise me.",
                       "Tell me something new."))  # fmt: skip
    country, city = rng.choice(list(CAPITALS.items()))
    text = rng.choice(EXPLANATIONS)[1] if rng.random() < 0.8 else f"The capital of {country} is {city}."
    return ask(
        "small talk",
        loosen(rng, form, lower=True),
        f"{rng.choice(('Did you know?', 'Here is one:', 'Well:'))} {text}",
        check="none",
    )


def is_plain(sentence: str) -> bool:
    """Whether a dictionary's example is a whole short sentence of plain words."""
    return re.fullmatch(r"[A-Za-z][a-z]*( [A-Za-z][a-z',]*){3,11}[.!]?", sentence) is not None
