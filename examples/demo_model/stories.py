"""Short stories on request, put together from parts that fit one another."""

import random

from .exchanges import Exchange, a, ask, loosen
from .facts import NAMES

HEROES = ["fox", "rabbit", "bear", "mouse", "cat", "dog", "horse", "owl", "frog", "duck", "wolf", "lion", "hedgehog",
          "squirrel", "turtle", "goat", "boy", "girl", "king", "queen", "farmer", "robot", "dragon", "princess",
          "sailor", "baker"]  # fmt: skip
KINDS = ["small", "little", "young", "clever", "kind", "quiet", "brave", "lonely", "happy", "old", "curious", "gentle"]
HOMES = ("in a small house near the river", "at the edge of a deep forest", "on a green hill",
         "in a village by the sea",
         "under an old oak tree", "in a busy town", "on a little farm", "beside a calm lake",
         "in a tall tower")  # fmt: skip

# (what the hero wants, what stands in the way, how it is solved, what is learnt)
PLOTS = (
    ("wanted to see the sea", "the road was long and nobody knew the way",
     "asked an old bird, who showed the path from above",
     "Standing on the beach at last, {n} knew that asking for help is no shame"),
    ("lost a golden key", "it had fallen into the deep well", "tied a spoon to a long rope and pulled the key up",
     "From that day on, {n} kept the key in a safe place"),
    ("was afraid of the dark", "one night all the lamps went out", "looked up and saw a thousand stars",
     "After that, {n} was never afraid of the night again"),
    ("wanted to bake the best cake in the land", "there was no honey left",
     "helped the bees find new flowers, and they shared their honey",
     "Everyone ate the cake together, and it was the best of all"),
    ("had no friends", "everybody seemed too busy to play", "began to help the others with their work",
     "Soon {n} had more friends than there are days in a month"),
    ("found a strange map", "part of it was missing", "followed the river until the missing part did not matter",
     "At the end there was no gold, but a garden full of ripe apples, and {n} was glad"),
    ("wanted to learn to sing", "every note came out wrong", "practised every morning beside the river",
     "When spring came, the whole valley stopped to listen to {n}"),
    ("heard a cry in the snow", "a small bird had hurt its wing", "carried it home and kept it warm until it could fly",
     "Every spring the bird came back to sing for {n}"),
    ("wanted to cross the wide river", "there was no bridge and no boat", "built a raft out of old branches",
     "On the other side, {n} laughed and waved to everyone"),
    ("was always in a hurry", "one day the wheel of the cart broke",
     "had to walk slowly and saw how beautiful the road was",
     "Since then, {n} takes time to look around"),
    ("wanted to be the strongest of all", "a heavy stone blocked the road",
     "called the others, and together they pushed it away",
     "So {n} learnt that many small hands are stronger than one big one"),
    ("planted a tiny seed", "no rain fell for many weeks", "carried water from the well every evening",
     "In summer a tall sunflower stood there, and {n} sat in its shade"),
)  # fmt: skip
OPENINGS = ("Once upon a time there was {k} {h} called {n}, who lived {p}.", "Long ago, {k} {h} named {n} lived {p}.",
            "There once was {k} {h} whose name was {n}. {n} lived {p}.")  # fmt: skip
LINKS = (
    ("One day {n}", "But", "So {n}"),
    ("One morning {n}", "Sadly,", "Then {n}"),
    ("In those days {n}", "However,", "In the end {n}"),
)


def story(rng: random.Random) -> Exchange:
    """A story of four or five sentences about the hero asked for."""
    hero, name = rng.choice(HEROES), rng.choice(NAMES)
    named = rng.random() < 0.25
    subject = f"{a(hero)} called {name}" if named else a(hero)
    forms = ("Tell me a story about {s}.", "Tell me a short story about {s}.", "Write a story about {s}.",
             "Can you tell me a story about {s}?",
             "Write a short story about {s}.", "I want to hear a story about {s}.",
             "Make up a story about {s}.")  # fmt: skip
    question = rng.choice(forms).format(s=subject)
    if rng.random() < 0.2 and not named:
        question = rng.choice(
            ("Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Write a story.")
        )
    want, trouble, solution, lesson = rng.choice(PLOTS)
    opening = rng.choice(OPENINGS).format(k=a(rng.choice(KINDS)), h=hero, n=name, p=rng.choice(HOMES))
    first, second, third = rng.choice(LINKS)
    ending = "" if rng.random() < 0.7 else rng.choice((" The end.", " And that is the end of the story."))
    text = f"{opening} {first} {want}. {second} {trouble}. {third} {solution}. {lesson}.{ending}".replace("{n}", name)
    return ask(
        "stories",
        loosen(rng, question),
        text,
        answer=name if named else hero,
        check="contains" if hero in question else "none",
    )
