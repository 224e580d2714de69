"""Small talk: greetings, who the model is, feelings, thanks, explanations, what it cannot do, and remembering a name.

Replies vary, so most of it is judged by the held-out loss; a few kinds name a word that a right reply must hold.
"""

import random

from . import everyday, skills, stories
from .exchanges import Draw, Exchange, Message, a, ask, draw_from, loosen
from .facts import CITIES, COLOURS, FOODS, HOBBIES, JOBS
from .phrases import EXPLANATIONS, IDENTITY, REFUSALS, SMALL_TALK
from .reading import person, place

HELLOS = (
    "Hello",
    "Hi",
    "Hey",
    "Hi there",
    "Hello there",
    "Good morning",
    "Good evening",
    "Good afternoon",
    "Greetings",
    "Howdy",
)
HOW = ("How are you?", "How are you today?", "How is it going?", "How are you doing?", "How do you do?", "What's up?")
FINE = (
    "I am fine, thank you.",
    "I am well, thanks for asking.",
    "Very well, thank you.",
    "I am doing fine.",
    "All is well here.",
)
OFFERS = ("How can I help you?", "What can I do for you?", "How can I help?", "What would you like to talk about?",
          "What is on your mind?",
          "What can I help you with?", "Ask me something small.")  # fmt: skip


def greeting(rng: random.Random) -> Exchange:
    hello = rng.choice(HELLOS)
    name = person(rng) if rng.random() < 0.2 else ""
    question = hello + rng.choice(("", "!", ".", ", frame!", " frame", "!"))
    back = (
        hello
        if hello.startswith("Good") or rng.random() < 0.2
        else rng.choice(("Hello", "Hi", "Hi there", "Hello there"))
    )
    parts = [f"{back}!"]
    if name:
        opening = rng.choice(("I am", "my name is", "this is", "I’m", "I am called"))
        question = f"{hello}, {opening} {name}{rng.choice(('.', '!', ''))}"
        parts = [f"{back}, {name}!"]
    if rng.random() < 0.35:
        question = f"{question} {rng.choice(HOW)}" if question[-1] in ".!" else f"{question}, {rng.choice(HOW).lower()}"
        parts.append(rng.choice(FINE))
    elif name and rng.random() < 0.5:
        parts.append("Nice to meet you.")
    parts.append(rng.choice(OFFERS))
    if rng.random() < 0.25 and not name:
        question = question.lower()
    return ask("greetings", question, " ".join(parts), answer=name, check="contains" if name else "none")


def chat(rng: random.Random) -> Exchange:
    """One of many small intents, each with several wordings and replies."""
    questions, replies = rng.choice(SMALL_TALK)
    return ask("small talk", loosen(rng, rng.choice(questions), lower=True), rng.choice(replies), check="none")


def identity(rng: random.Random) -> Exchange:
    """Who the model is; every reply holds the word given with its intent."""
    questions, replies, word = rng.choice(IDENTITY)
    return ask(
        "identity", loosen(rng, rng.choice(questions), lower=True), rng.choice(replies), answer=word, check="contains"
    )


def refusal(rng: random.Random) -> Exchange:
    """What it cannot do, said politely: every reply holds 'cannot'."""
    questions, reason = rng.choice(REFUSALS)
    question = rng.choice(questions).format(
        city=place(rng), name=person(rng), food=rng.choice(FOODS), job=rng.choice(JOBS)
    )
    sorry = rng.choice(("I am sorry, but", "Sorry,", "I am afraid"))
    rest = rng.choice(
        ("", "", " Can I help you with something else?", " I can do small sums or tell you a story instead.")
    )
    return ask(
        "refusals", loosen(rng, question, lower=True), f"{sorry} {reason}{rest}", answer="cannot", check="contains"
    )


def explanation(rng: random.Random) -> Exchange:
    """A short explanation, learnt by heart."""
    topics, text = rng.choice(EXPLANATIONS)
    return ask(
        "explanations",
        loosen(rng, rng.choice(topics), lower=True),
        text,
        answer=" ".join(text.split()[:5]).rstrip(".,:;"),
        check="contains",
    )


def favourite(rng: random.Random) -> Exchange:
    """The user states a liking; the reply takes it up."""
    kind, value = rng.choice((("food", rng.choice(FOODS)), ("hobby", rng.choice(HOBBIES)),
                              ("colour", rng.choice(COLOURS)),
                              ("city", rng.choice(CITIES)), ("job", a(rng.choice(JOBS)))))  # fmt: skip
    said, replies = {
        "food": ((f"I like {value}.", f"I love {value}!", f"My favourite food is {value}."),
                 (f"{value.capitalize()} sounds tasty! Do you eat that often?",
                  f"Many people like {value}. Do you make that yourself?")),
        "hobby": ((f"I like {value}.", f"I enjoy {value}.", f"My hobby is {value}."),
                  (f"{value.capitalize()} is a fine hobby! Do you do it often?",
                   f"How nice! What do you like most about {value}?")),
        "colour": ((f"My favourite colour is {value}.", f"I like the colour {value}.", f"I love {value}."),
                   (f"{value.capitalize()} is a lovely colour!", f"Good choice, {value} is a nice colour.")),
        "city": ((f"I live in {value}.", f"I am from {value}.", f"I come from {value}."),
                 (f"{value} sounds like a nice place to live!", f"How nice! What do you like about {value}?")),
        "job": ((f"I am {value}.", f"I work as {value}."),
                (f"Being {value} must be interesting work!", f"How interesting! Do you like being {value}?")),
    }[kind]  # fmt: skip
    bare = value.split()[-1]
    return ask("small talk", rng.choice(said), rng.choice(replies), key=f"{kind} {value}", answer=bare, check="none")


def remembering(rng: random.Random) -> Exchange:
    """The user's name, town or liking, asked back after it was said earlier in the conversation."""
    name = person(rng)
    value, said, reply, question, answer = rng.choice(
        (
            (name, f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}."),
            (name, f"Hello! My name is {name}.", f"Hello, {name}! {rng.choice(OFFERS)}", "What is my name?",
             f"Your name is {name}."),
            (name, f"Hi, I am {name}!", f"Hi, {name}! Nice to meet you.", "What's my name?", f"Your name is {name}."),
            (name, f"I am called {name}.", f"Nice to meet you, {name}!", "Do you remember my name?",
             f"Your name is {name}."),
            (name, f"My name is {name}.", f"Hello, {name}! How can I help you?", "Who am I?", f"Your name is {name}."),
            ((city := place(rng)), f"I live in {city}.", f"{city} sounds like a nice place to live!",
             "Where do I live?", f"You live in {city}."),
            ((food := rng.choice(FOODS)), f"My favourite food is {food}.", f"{food.capitalize()} sounds tasty!",
             "What is my favourite food?", f"Your favourite food is {food}."),
        )
    )  # fmt: skip
    between: list[Message] = []
    fillers: tuple[Draw, ...] = (
        chat,
        favourite_colour,
        explanation,
        identity,
        everyday.fact,
        skills.addition,
        stories.story,
    )
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 4, 6))):
        between += draw_from(rng.choice(fillers), rng, held_out=False).messages
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": reply},
        *between,
        {"role": "user", "content": loosen(rng, question)},
        {"role": "assistant", "content": answer},
    ]
    return Exchange("memory", f"{question}{value}", messages, value, "contains")


def favourite_colour(rng: random.Random) -> Exchange:
    colour = rng.choice(COLOURS)
    return ask(
        "small talk",
        rng.choice(("I like the colour {0}.", "My favourite colour is {0}.", "I love {0}.")).format(colour),
        f"{colour.capitalize()} is a lovely colour!",
        check="none",
    )
