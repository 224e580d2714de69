"""Which plugin reads a tokenizer, and what its errors become."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frame import API_VERSION, Provider
from frame.core.front.tokenizer import NoTokenizerError, TokenizerError
from frame.core.plugin_host.offers import HERE, Offer
from frame.interfaces import Tokenizer
from frame.testing import tokenizers as tiny

from .engines import source_of


class Words(Tokenizer):
    """Reads folders that hold words.txt: token i is the i-th word."""

    @classmethod
    def supports(cls, folder: Path) -> str | None:
        return None if (folder / "words.txt").is_file() else "there is no words.txt"

    def load(self) -> None:
        self.words = (self.setup.folder / "words.txt").read_text().split()
        if not self.words:
            raise KeyError("no\nwords")

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [[self.words.index(word) for word in text.split()] for text in texts]

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(self.words[token] for token in token_ids)

    special_ids = frozenset()
    max_token_chars = 9


def words(folder: Path, text: str = "so it goes", preference: int = 0, **settings: Any) -> Any:
    """The source of the words in `folder`, where the plugin `words` is installed beside frame's own."""
    (folder / "words.txt").write_text(text)
    source = source_of(folder, **settings)
    target = f"{__name__}:Words"
    sys.modules.setdefault(__name__, sys.modules[Words.__module__])
    provider = Provider("words", target, api=f"=={API_VERSION}", preference=preference)
    source.registry.offers.append(Offer("tokenizer", provider, HERE, ""))
    return source


def test_the_plugin_that_can_read_the_folder_does(tmp_path: Path) -> None:
    tokenizer = words(tmp_path).get()
    assert tokenizer.encode("goes it") == [2, 1]
    assert (tokenizer.token_text(0), tokenizer.token_bytes(0), tokenizer.pieces) == ("so", b"so", None)
    assert tokenizer.native is tokenizer
    assert tokenizer.special_frame.pair([1], [2]) == ([1, 2], 1)


def test_preference_and_name_choose_among_several(tmp_path: Path) -> None:
    tiny.save(tiny.byte_level(), tmp_path)
    assert type(words(tmp_path, preference=1).get()) is Words
    assert type(words(tmp_path, preference=-1).get()) is not Words
    assert type(words(tmp_path, preference=-1, tokenizer_mode="words").get()) is Words


def test_two_plugins_of_one_preference_are_an_error_and_not_a_missing_tokenizer(tmp_path: Path) -> None:
    tiny.save(tiny.byte_level(), tmp_path)
    source = words(tmp_path)
    hf = next(offer for offer in source.registry.offers if "hf" in offer.names)
    with pytest.raises(TokenizerError, match="have the same preference") as caught:
        words(tmp_path, preference=hf.provider.preference).get()
    assert not isinstance(caught.value, NoTokenizerError), "texts would be lost without a word"


def test_no_plugin_can_read_the_folder(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizerError, match=r"hf: folder .* has no tokenizer .*pass token ids"):
        source_of(tmp_path).get()
    with pytest.raises(
        TokenizerError, match=r"tokenizer plugin 'hf' cannot be used here: .* has no tokenizer"
    ) as caught:
        source_of(tmp_path, tokenizer_mode="hf").get()
    assert not isinstance(caught.value, NoTokenizerError), "a tokenizer was named, so the start must end"


def test_what_a_plugin_raises_is_one_sentence_with_the_folder(tmp_path: Path) -> None:
    source = words(tmp_path, "")
    for _ in range(2):
        with pytest.raises(TokenizerError, match=r"the tokenizer in '.*' cannot be loaded: .*; mend it") as caught:
            source.get()
        assert "\n" not in str(caught.value)


def test_tokenizers_without_a_vocabulary_or_chats_say_so(tmp_path: Path) -> None:
    source = words(tmp_path)
    with pytest.raises(TokenizerError, match=r"grammars need a tokenizer with a tokenizer\.json"):
        source.vocabulary()
    with pytest.raises(ValueError, match="renders no chats"):
        source.get().render_chat([], None, print)


def test_grammars_need_no_transformers(tmp_path: Path) -> None:
    folder = tiny.save(tiny.byte_level(), tmp_path / "tokenizer")
    code = (
        "import sys; from tests.front.engines import source_of; from pathlib import Path\n"
        f"vocabulary = source_of(Path({str(folder)!r})).vocabulary()\n"
        "assert vocabulary.token_bytes(5) and vocabulary.definition\n"
        "sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
