"""Exchanges that repeat what was given: words, phrases, numbers, and the letters of a word."""

import random
from collections.abc import Sequence

from .exchanges import Exchange, ask

FORMS = (
    "Repeat: {}", "Repeat after me: {}", "Say: {}", "Please repeat: {}", "Copy this: {}", "Write this: {}", "Echo: {}",
    "Repeat the following: {}", "Repeat this exactly: {}", "Copy: {}", "Please say: {}", "Repeat these words: {}",
    "Can you repeat this? {}", "Type this: {}", "Say this: {}", 'Say "{}"', 'Repeat "{}"', 'Please repeat "{}".',
    'Write "{}".',
)  # fmt: skip
NUMBER_WORDS = {2: ("two times", "twice", "2 times"), 3: ("three times", "3 times"), 4: ("four times", "4 times")}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Copying:
    """Draws things to repeat from a list of words."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def _word(self, rng: random.Random) -> str:
        chance = rng.random()
        if chance < 0.7:
            word = rng.choice(self._words)
        elif chance < 0.85:
            word = "".join(rng.choice(LETTERS) for _ in range(rng.randrange(2, 8)))
        else:
            return str(rng.randrange(10 ** rng.randrange(1, 6)))
        case = rng.random()
        return word.capitalize() if case < 0.2 else word.upper() if case < 0.25 else word

    def repeat(self, rng: random.Random) -> Exchange:
        """A word or a phrase, given back as it stands."""
        count = rng.choice((1, 1, 2, 3, 3, 4, 5, 6, 8))
        phrase = " ".join(self._word(rng) for _ in range(count))
        if rng.random() < 0.2:
            phrase = f"{phrase[0].upper()}{phrase[1:]}{rng.choice('.!?')}"
        return ask("copying", rng.choice(FORMS).format(phrase), phrase, key=phrase)

    def repeat_often(self, rng: random.Random) -> Exchange:
        """A word, several times over."""
        word, count = self._word(rng), rng.choice((2, 2, 3, 3, 3, 4))
        times = rng.choice(NUMBER_WORDS[count])
        form = rng.choice(
            ("Say {w} {t}.", "Repeat {w} {t}.", "Write {w} {t}.", 'Say "{w}" {t}.', "Repeat the word {w} {t}.")
        )
        return ask("copying", form.format(w=word, t=times), " ".join([word] * count), key=word)

    def first_or_last(self, rng: random.Random) -> Exchange:
        """The first, second or last word of a list."""
        items = [self._word(rng) for _ in range(rng.randrange(2, 7))]
        which, item = rng.choice((("first", items[0]), ("last", items[-1]), ("second", items[1])))
        listed = rng.choice((", ", " ")).join(items)
        form = rng.choice(("What is the {n} word here: {l}", "Which word is {n}: {l}",
                           "What is the {n} word of this list: {l}",
                           "Tell me the {n} word: {l}", "Give me the {n} word: {l}"))  # fmt: skip
        return ask("choosing", form.format(n=which, l=listed), item, key=" ".join(items))

    def spell(self, rng: random.Random) -> Exchange:
        """The letters of a word."""
        word = rng.choice(self._words)
        form = rng.choice(
            ("Spell {}.", "How do you spell {}?", "Spell the word {}.", "Can you spell {}?", 'Spell "{}".')
        )
        return ask("spelling", form.format(word), "-".join(word.upper()), key=word)
