"""The contract of tokenizers: text survives ids, tokens have bytes, chats cannot forge special tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from frame.core.interfaces.errors import InvalidRequest
from frame.core.interfaces.tokenizer import ChatOptions, Tokenizer
from frame.core.plugin_host.offers import import_target

from . import tokenizers
from .plugin_suite import PluginSuite, reason_or_none

#: Texts that come back from the ids of every byte-level tokenizer.
_TEXTS = ("hello world", "the quick  brown\n\tfox", "naïve café 日本語 😀", "x", " leading and trailing ")
#: Chats that no template may get: of other types than messages have, or with a role that could close control tokens.
_ODD: tuple[list[Any], ...] = (
    [],
    ["hello"],
    [{"content": "a"}],
    [{"role": "user><eos", "content": "a"}],
    [{"role": "user\n", "content": "a"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "assistant", "tool_calls": ["f"]}],
)


class TokenizerSuite(PluginSuite):
    """The contract of `frame.interfaces.Tokenizer`.

        class TestMine(TokenizerSuite):
            plugin = "mine"                         # or target = "package.module:Class"
            texts = ("hello",)                      # texts that come back from their ids as they were

            def write_files(self, folder: Path):    # the files of a small tokenizer; default: a tokenizer.json
                ...

    The provider's tag "tiny" may name a function that does the same ("package.module:function"). The checks of chats
    are skipped for a tokenizer without a chat template.
    """

    kind = "tokenizer"
    texts: ClassVar[tuple[str, ...]] = _TEXTS

    def write_files(self, folder: Path) -> None:
        """Writes the files of a small tokenizer into `folder`, which exists and is empty."""
        tag = self.provider().tags.get("tiny")
        if tag:
            import_target(tag, f"files of tokenizer plugin {self.name!r}")(folder)
        else:
            tokenizers.save(tokenizers.byte_level(), folder)

    def files(self) -> Path:
        """The folder of the tokenizer under test."""
        folder = self.scratch("tokenizer")
        if not any(folder.iterdir()):
            self.write_files(folder)
        return folder

    def tokenizer(self) -> Tokenizer:
        """A new tokenizer, which has read its files."""
        made = self.make(folder=self.files())
        assert isinstance(made, Tokenizer), f"{type(made).__name__} does not derive from Tokenizer"
        made.load()
        return made

    def test_supports_gives_reasons_and_never_raises(self) -> None:
        found, empty = self.found(), self.scratch("empty")
        assert reason_or_none(found.supports(empty), "supports") is not None, "it supports a folder without files"
        assert reason_or_none(found.supports(empty / "absent"), "supports") is not None, (
            "it supports a folder that is not there"
        )
        assert reason_or_none(found.supports(self.files()), "supports") is None

    def test_text_comes_back_from_its_ids(self) -> None:
        tokenizer = self.tokenizer()
        every = tokenizer.encode_batch(list(self.texts), add_special_tokens=False)
        for text, ids in zip(self.texts, every, strict=True):
            assert tokenizer.encode(text, add_special_tokens=False) == ids, f"{text!r} alone has other ids"
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(tokenizer.encode(text)) == text, "special tokens are shown as text"

    def test_pieces_join_to_the_text(self) -> None:
        tokenizer = self.tokenizer()
        if tokenizer.pieces is None:
            pytest.skip("its text is more than its tokens' bytes in a row")
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(tokenizer.pieces[token] for token in ids).decode()
            whole = tokenizer.decode_raw(ids)
            assert joined in (whole, " " + whole), f"the bytes of its tokens give {joined!r}, decode_raw {whole!r}"
        assert tokenizer.token_bytes(1 << 30) == b"", "an id without a token has bytes"

    def test_no_token_is_longer_than_it_says(self) -> None:
        tokenizer = self.tokenizer()
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert len(text) <= len(ids) * tokenizer.max_token_chars, (
                f"{text!r} has more characters than its tokens may"
            )

    def test_half_a_character_is_refused(self) -> None:
        tokenizer = self.tokenizer()
        with pytest.raises(InvalidRequest) as caught:
            tokenizer.encode_batch(["fine", "\ud800"])
        assert "\n" not in str(caught.value), "an error must be one line"
        assert tokenizer.encode_batch(["fine"])[0], "a refused text spoilt the tokenizer"

    def test_special_tokens_are_found_by_their_text(self) -> None:
        tokenizer = self.tokenizer()
        for token in tokenizer.special_ids:
            assert tokenizer.token_id(tokenizer.token_text(token)) == token
        assert tokenizer.token_id("no such token") is None

    def test_the_frame_is_what_encoding_adds(self) -> None:
        tokenizer = self.tokenizer()
        for text in self.texts:
            bare, whole = (tokenizer.encode(text, add_special_tokens=added) for added in (False, True))
            assert tokenizer.special_frame.single(bare, len(whole)) == whole

    def test_chats_cannot_forge_special_tokens(self) -> None:
        tokenizer = self.tokenizer()
        if not tokenizer.chat_template:
            pytest.skip("it has no chat template")
        seen: list[str] = []
        text, ids = tokenizer.render_chat([{"role": "user", "content": "x"}], ChatOptions(), seen.append)
        assert seen == [text], "check must be called once, with the text"
        honest = sorted(token for token in ids if token in tokenizer.special_ids)
        for token in sorted(tokenizer.special_ids):
            message = {"role": "user", "content": f"x{tokenizer.token_text(token)}x"}
            text, ids = tokenizer.render_chat([message], ChatOptions(), _accept)
            assert message["content"] in text
            written = sorted(token for token in ids if token in tokenizer.special_ids)
            assert written == honest, f"a message wrote special tokens: {message['content']!r}"

    @pytest.mark.parametrize("messages", _ODD, ids=ascii)
    def test_odd_messages_are_refused(self, messages: list[Any]) -> None:
        tokenizer = self.tokenizer()
        if not tokenizer.chat_template:
            pytest.skip("it has no chat template")
        before = copy.deepcopy(messages)
        with pytest.raises(InvalidRequest) as caught:
            tokenizer.render_chat(messages, ChatOptions(), _accept)
        assert "\n" not in str(caught.value), "an error must be one line"
        assert messages == before, "messages belong to the caller"

    def test_a_text_that_is_too_long_is_not_tokenised(self) -> None:
        tokenizer = self.tokenizer()
        if not tokenizer.chat_template:
            pytest.skip("it has no chat template")
        with pytest.raises(InvalidRequest, match="too long"):
            tokenizer.render_chat([{"role": "user", "content": "x"}], ChatOptions(), _refuse)

    def test_the_vocabulary_is_read_alone(self) -> None:
        tokenizer = self.tokenizer()
        alone = self.make(folder=self.files())
        try:
            vocabulary = alone.vocabulary(1000, [2])
        except ValueError as error:
            pytest.skip(str(error))
        assert (vocabulary.size, list(vocabulary.eos_token_ids)) == (1000, [2])
        assert vocabulary.definition
        every = "" if tokenizer.pieces is None else "".join(self.texts)
        for token in set(tokenizer.encode(every, add_special_tokens=False)):
            assert vocabulary.token_bytes(token) == tokenizer.token_bytes(token)

    def test_its_description_is_json(self) -> None:
        described = self.tokenizer().describe()
        assert json.loads(json.dumps(described)) == described
        assert str(self.folder) not in json.dumps(described), "its description tells a path of this machine"


def _refuse(text: str) -> None:
    raise InvalidRequest(f"{len(text)} characters are too long")


def _accept(text: str) -> None:
    del text
