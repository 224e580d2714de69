"""English prose and word lists from installed Debian packages: WordNet and The Devil's Dictionary.

Both packages are free to use and to change; README.md names the sources and the licences.
"""

import gzip
import re
from pathlib import Path

WORDNET = Path("usr/share/wordnet")
DEVIL = Path("usr/share/dictd/devil.dict.dz")
PART_NAMES = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


def wordnet_entries(root: Path) -> list[str]:
    """One short text for each sense: the words, the part of speech, the definition and the examples."""
    entries = []
    for part, label in PART_NAMES.items():
        for line in (root / WORDNET / f"data.{part}").read_text("utf-8").splitlines():
            if line.startswith("  "):
                continue  # the licence at the head of each file
            fields, gloss = line.split(" | ", 1)
            columns = fields.split()
            count = int(columns[3], 16)
            words = [re.sub(r"\(\w+\)$", "", columns[4 + 2 * i]).replace("_", " ") for i in range(count)]
            definition, *examples = re.split(r'; (?=")', gloss.strip())
            shown = " ".join(f"{e.strip().strip(chr(34)).rstrip(';')}." for e in examples)
            text = f"{', '.join(words[:3])} ({label}): {definition.rstrip(';')}. {shown}".strip()
            entries.append(re.sub(r"([.!?])\.", r"\1", text))
    return entries


def example_sentences(root: Path) -> list[str]:
    """The example sentences of all entries, without their quotes."""
    found = []
    for part in PART_NAMES:
        for line in (root / WORDNET / f"data.{part}").read_text("utf-8").splitlines():
            if not line.startswith("  "):
                found += re.findall(r'"([^"]+)"', line.split(" | ", 1)[1])
    return found


def devil_entries(root: Path) -> list[str]:
    """The definitions of The Devil's Dictionary, without verse, each as one paragraph."""
    text = gzip.decompress((root / DEVIL).read_bytes()).decode("latin-1")
    entries = []
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match(r"[A-Z][A-Z'-]+, [a-z.]+", paragraph):
            entries.append(re.sub(r"\s+", " ", paragraph).strip())
    return entries


def simple_words(root: Path, *, max_letters: int = 9) -> list[str]:
    """Lower-case single words that WordNet counts in its corpus, for repeating and spelling."""
    words = set()
    for line in (root / WORDNET / "cntlist.rev").read_text("utf-8").splitlines():
        word = line.split("%")[0]
        if re.fullmatch(rf"[a-z]{{2,{max_letters}}}", word):
            words.add(word)
    return sorted(words)


def topics(root: Path) -> list[str]:
    """Nouns and proper names of one to three words, for questions that the model has no answer to."""
    found = set()
    for line in (root / WORDNET / "data.noun").read_text("utf-8").splitlines():
        if line.startswith("  "):
            continue
        word = line.split()[4].replace("_", " ")
        if re.fullmatch(r"[A-Za-z][a-z]+( [A-Za-z][a-z]+){0,2}", word) and len(word) > 4:
            found.add(word)
    return sorted(found)
