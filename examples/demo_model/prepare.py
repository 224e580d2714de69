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
from .dialogues import Dialogues
from .exchanges import draw_from
from .tokens import MAX_LENGTH, PAD, Encoder, Rows, pack, save_tokenizer, train_tokenizer

SHARD_CONVERSATIONS = 20_000


def load_dialogues(folder: Path) -> Dialogues:
    """The generators with the word lists that `prepare` wrote."""
    words, topics = json.loads((folder / "words.json").read_text("utf-8"))
    return Dialogues(words, topics)


def conversation_shard(folder: Path, seed: int) -> Rows:
    """Rows of training conversations drawn with one seed."""
    dialogues, rng = load_dialogues(folder), random.Random(seed)  # noqa: S311 - reproducible, not secret
    encoder = Encoder(tokenizer := Tokenizer.from_file(str(folder / "tokenizer.json")))
    documents: list[list[int]] = []
    for _ in range(SHARD_CONVERSATIONS // 1000):
        documents += encoder.conversation_batch([dialogues.conversation(rng) for _ in range(1000)])
    return pack(documents, tokenizer.token_to_id(PAD))


def held_out_rows(folder: Path, tokenizer: Tokenizer, held_texts: list[str]) -> Rows:
    """One exchange a document, from the held-out items of every task, and held-out dictionary entries."""
    from .dialogues import Conversation

    dialogues, rng = load_dialogues(folder), random.Random(7)  # noqa: S311
    encoder = Encoder(tokenizer)
    drawn = [draw_from(draw, rng, held_out=True) for draw in dialogues.weights for _ in range(60)]
    documents = encoder.conversation_batch([Conversation(e.messages, e.tools) for e in drawn])
    return pack(documents + encoder.text_batch(held_texts[:400]), tokenizer.token_to_id(PAD))


def text_rows(tokenizer: Tokenizer, entries: list[str]) -> Rows:
    """Dictionary entries, a few to a document."""
    rng = random.Random(3)  # noqa: S311
    documents, index = [], 0
    while index < len(entries):
        count = rng.choice((1, 1, 2, 4, 8))
        documents.append("\n".join(entries[index : index + count]))
        index += count
    return pack(Encoder(tokenizer).text_batch(documents), tokenizer.token_to_id(PAD))


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
    rng = random.Random(1)  # noqa: S311

    entries = texts.wordnet_entries(options.packages)
    rng.shuffle(entries)
    devil = texts.devil_entries(options.packages)
    held, kept = entries[:1000], entries[1000:]
    lists = [texts.simple_words(options.packages), texts.topics(options.packages)]
    (folder / "words.json").write_text(json.dumps(lists), "utf-8")

    dialogues = load_dialogues(folder)
    sample = [m["content"] for _ in range(60_000) for m in dialogues.conversation(rng).messages]
    tokenizer = train_tokenizer(sample + kept[:20_000] + [json.dumps(dialogues.conversation(rng).tools) for _ in range(5000)])
    save_tokenizer(tokenizer, folder)
    print(f"{len(entries)} dictionary entries, {len(devil)} of them satirical more; {len(lists[0])} words, {len(lists[1])} topics")

    with ProcessPoolExecutor(options.processes) as pool:
        shards = list(pool.map(conversation_shard, [folder] * options.shards, range(100, 100 + options.shards)))
    text = text_rows(tokenizer, kept + devil)
    rows = np.concatenate([*shards, text])
    np.random.default_rng(5).shuffle(rows)
    write_rows(folder / "rows.xz", rows)
    write_rows(folder / "held_out.xz", held_out_rows(folder, tokenizer, held))
    share = float((rows != tokenizer.token_to_id(PAD)).mean())
    print(f"{rows.shape[0]} rows of {MAX_LENGTH} tokens, {len(text)} of text, {share:.1%} filled, {(rows >= 0x8000).mean():.1%} counted")


if __name__ == "__main__":
    main()
