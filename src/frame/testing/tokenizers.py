"""Tiny tokenizers for tests, built without downloads: byte-level BPE, byte fallback, word pieces.

`save` writes one into a folder, `load` reads such a folder with frame's own plugin.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.setup import TokenizerSetup
from frame.core.plugin_host.registry import Registry

if TYPE_CHECKING:
    from frame.core.interfaces.grammar import Vocabulary
    from frame.core.interfaces.tokenizer import Tokenizer

SPECIAL = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>")
_TEXT = (
    "the quick brown fox jumps over the lazy dog. hello world, how are you today? "
    "naïve café déjà vu größer Straße; 日本語のテキスト 😀😁 один два три. "
) * 4
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level(vocab_size: int = 400) -> Any:
    """A `tokenizers.Tokenizer`: BPE over bytes, some characters of several bytes merged and some not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer


def byte_fallback() -> Any:
    """A SentencePiece-like one: word marks for spaces, bytes for characters that are not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzé."]
    tokens += ["▁the", "▁hello", "▁world"]
    merges = [("▁t", "h"), ("▁th", "e"), ("▁", "t")]
    tokens += ["▁t", "▁th"]
    vocabulary = {token: position for position, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)  # noqa: S106
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def word_pieces() -> Any:
    """One whose decoder looks at neighbours: words are joined with spaces, continuations are not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL, "[UNK]", "the", "hello", "world", "fox", "##es", "##ed", ",", ".", "日", "é"]
    tokenizer = Tokenizer(
        models.WordPiece({token: position for position, token in enumerate(tokens)}, unk_token="[UNK]")  # noqa: S106
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save(tokenizer: Any, folder: Path, template: str | None = TEMPLATE) -> Path:
    """Writes tokenizer.json and tokenizer_config.json into `folder`, which is made; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def load(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`, ready for use, as frame's own plugin reads it."""
    tokenizer: Tokenizer = Registry.load().make("tokenizer", "frame-llm:hf", TokenizerSetup(folder))
    tokenizer.load()
    return tokenizer


def vocabulary(size: int) -> Vocabulary:
    """The tokens of `byte_level` for grammars of a model that scores `size` ids; token 2 ends an output."""
    with TemporaryDirectory() as folder:
        return load(save(byte_level(), Path(folder) / "tokenizer")).vocabulary(size, [2])
