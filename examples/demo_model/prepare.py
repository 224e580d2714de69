"""Write everything that training reads: the tokenizer, token rows, held-out rows and word lists.

    python -m examples.demo_model.prepare --packages / --out .demo

Runs on a CPU in a few minutes; `--packages` is the root under which the Debian packages are unpacked.
"""

import argparse
import json
import lzma
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import texts
from .dialogues import Conversation, Dialogues
from .exchanges import draw_from
from .open_talk import is_plain
from .tokens import COUNTED, MAX_LENGTH, PAD, Encoder, Rows, pack, save_tokenizer, special_ids, train_tokenizer

SHARD_CONVERSATIONS = 20_000
PROSE = 60_000


def load_dialogues(folder: Path) -> Dialogues:
    """The generators with the word lists that `prepare` wrote."""
    return Dialogues(*json.loads((folder / "words.json").read_text("utf-8")))


def conversation_shard(folder: Path, seed: int) -> Rows:
    """Rows of training conversations drawn with one seed."""
    dialogues, rng = load_dialogues(folder), random.Random(seed)
    encoder = Encoder(tokenizer := Tokenizer.from_file(str(folder / "tokenizer.json")))
    documents: list[list[int]] = []
    for _ in range(SHARD_CONVERSATIONS // 1000):
        documents += encoder.conversation_batch([dialogues.conversation(rng) for _ in range(1000)])
    return pack(documents, special_ids(tokenizer)[PAD])


def held_out_rows(folder: Path, tokenizer: Tokenizer, held_texts: list[str]) -> Rows:
    """One exchange a document, from the held-out items of every task, and held-out dictionary entries."""
    dialogues, rng = load_dialogues(folder), random.Random(7)
    encoder = Encoder(tokenizer)
    drawn = [draw_from(draw, rng, held_out=True) for draw in dialogues.weights for _ in range(60)]
    documents = encoder.conversation_batch([Conversation(e.messages, e.tools) for e in drawn])
    return pack(documents + encoder.text_batch(held_texts[:400]), special_ids(tokenizer)[PAD])


def text_rows(tokenizer: Tokenizer, entries: list[str]) -> Rows:
    """Dictionary entries, a few to a document."""
    rng = random.Random(3)
    rng.shuffle(entries)
    documents, index = [], 0
    while index < len(entries):
        count = rng.choice((1, 1, 2, 4, 8))
        documents.append("\n".join(entries[index : index + count]))
        index += count
    return pack(Encoder(tokenizer).text_batch(documents), special_ids(tokenizer)[PAD])


def write_rows(path: Path, rows: Rows) -> None:
    path.write_bytes(lzma.compress(rows.astype("<u2").tobytes(), preset=1))


def read_rows(path: Path) -> Rows:
    return np.frombuffer(lzma.decompress(path.read_bytes()), "<u2").reshape(-1, MAX_LENGTH).astype(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path("/"), help="root of the unpacked Debian packages")
    parser.add_argument("--out", type=Path, default=Path(".demo"))
    parser.add_argument("--shards", type=int, default=20, help=f"shards of {SHARD_CONVERSATIONS} conversations")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)

    entries = texts.wordnet_entries(options.packages)
    rng.shuffle(entries)
    devil = texts.devil_entries(options.packages)
    held, kept = entries[:1000], entries[1000:]
    sentences = [s for s in texts.example_sentences(options.packages) if is_plain(s)]
    lists = [texts.simple_words(options.packages), texts.topics(options.packages), sentences]
    (folder / "words.json").write_text(json.dumps(lists), "utf-8")

    dialogues = load_dialogues(folder)
    sample = [m["content"] for _ in range(60_000) for m in dialogues.conversation(rng).messages]
    tokenizer = train_tokenizer(
        sample + kept[:20_000] + [json.dumps(dialogues.conversation(rng).tools) for _ in range(5000)]
    )
    save_tokenizer(tokenizer, folder)
    print(
        f"{len(entries)} entries of WordNet, {len(devil)} of The Devil's Dictionary; "
        f"{len(lists[0])} words, {len(lists[1])} topics, {len(sentences)} sentences"
    )

    with ProcessPoolExecutor(options.processes) as pool:
        shards = list(pool.map(conversation_shard, [folder] * options.shards, range(100, 100 + options.shards)))
    text = text_rows(tokenizer, kept + devil + [dialogues.prose(rng) for _ in range(PROSE)])
    rows = np.concatenate([*shards, text])
    np.random.default_rng(5).shuffle(rows)
    write_rows(folder / "rows.xz", rows)
    write_rows(folder / "held_out.xz", held_out_rows(folder, tokenizer, held))
    share = float((rows != special_ids(tokenizer)[PAD]).mean())
    print(
        f"{rows.shape[0]} rows of {MAX_LENGTH} tokens, {len(text)} of text, "
        f"{share:.1%} filled, {(rows >= COUNTED).mean():.1%} counted"
    )


if __name__ == "__main__":
    main()
