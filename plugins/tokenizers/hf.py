"""Tokenizers that the transformers library reads, with their chat templates.

The library is imported when a tokenizer is loaded; the vocabulary for grammars is read from tokenizer.json without it.
Chat templates run in the library's sandbox (immutable, no private attributes).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from frame.interfaces import ChatOptions, InvalidRequest, Pieces, SpecialFrame, Tokenizer, TokenizerSetup

from .messages import read_messages
from .token_bytes import read_pieces
from .vocabulary import HfVocabulary

#: tokenizer_config.json's classes that are nothing but tokenizer.json; loading them directly imports no torch.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model")
#: Names of settings that say where a tokenizer was loaded from, or hold a secret.
_LOCAL_SETTING = re.compile(r"file|^(name_or_path|is_local|cache_dir|backend|token|use_auth_token)$")
_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
#: Variables of a template that the library sets, besides the parameters of its `apply_chat_template`.
_OWN_VARIABLES = ("messages", "sanitize_control_tokens")
_PROBE = "a"
#: The first release of transformers that keeps apart control tokens and texts of a request that look like them.
_SANITIZING = Version("5.23")


class HfTokenizer(Tokenizer):
    """A transformers tokenizer. `native` is the library's object."""

    def __init__(self, setup: TokenizerSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._loaded: Any = None

    @classmethod
    def supports(cls, folder: Path) -> str | None:
        if any((folder / name).is_file() for name in _FILES):
            return None
        return f"folder {str(folder)!r} has no tokenizer ({', '.join(_FILES)})"

    def load(self) -> None:
        if self._loaded is None:
            self._loaded = _load(self.setup.folder)

    @property
    def native(self) -> Any:
        self.load()
        return self._loaded

    @cached_property
    def _backend(self) -> Any:
        """The `tokenizers.Tokenizer` inside, or None."""
        return getattr(self.native, "backend_tokenizer", None)

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            encoded = self.native(
                texts,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except (UnicodeEncodeError, TypeError) as error:
            if all(_is_encodable(text) for text in texts):
                raise
            raise InvalidRequest("text holds a lone surrogate, which is no character", "prompt") from error
        return encoded["input_ids"]  # type: ignore[no-any-return]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.native.decode(list(token_ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=False)  # type: ignore[no-any-return]
        return self.native.decode(  # type: ignore[no-any-return]
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @cached_property
    def pieces(self) -> Pieces | None:
        return read_pieces(self._backend)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        ids = set(self.native.all_special_ids)
        if self._backend is not None:
            ids.update(i for i, added in self._backend.get_added_tokens_decoder().items() if added.special)
        return frozenset(ids)

    @cached_property
    def eos_token_id(self) -> int | None:
        return self.native.eos_token_id  # type: ignore[no-any-return]

    @cached_property
    def max_token_chars(self) -> int:
        return max(map(len, self.native.get_vocab()), default=1)

    @cached_property
    def special_frame(self) -> SpecialFrame:
        """Found by encoding a short text; tokenizers without a place for a second text simply join the two."""
        encode = self.native
        bare, single, pair = (
            list(encoded["input_ids"])
            for encoded in (encode(_PROBE, add_special_tokens=False), encode(_PROBE), encode(_PROBE, _PROBE))
        )
        start = next((i for i in range(len(single)) if single[i : i + len(bare)] == bare), 0)
        head, tail = single[:start], single[start + len(bare) :]
        middle = pair[len(head) + len(bare) : len(pair) - len(tail) - len(bare)]
        return SpecialFrame(head, middle, tail, cut_left=getattr(encode, "truncation_side", "right") == "left")

    @property
    def chat_template(self) -> Any:
        return self.native.chat_template

    def render_chat(
        self, messages: Sequence[Any], options: ChatOptions, check: Callable[[str], None]
    ) -> tuple[str, list[int]]:
        read = read_messages(messages, options)
        apply = self.native.apply_chat_template
        parameters = inspect.signature(apply).parameters
        reserved = sorted({*parameters, *_OWN_VARIABLES}.intersection(options.template_kwargs))
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")
        arguments: dict[str, Any] = dict(
            options.template_kwargs,
            tools=list(options.tools) if options.tools else None,
            documents=list(options.documents) if options.documents else None,
            chat_template=options.chat_template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
        text = apply(read, tokenize=False, **arguments)
        check(text)
        written = [read, arguments["tools"], arguments["documents"], options.template_kwargs]
        spelt = self._spells_special(written)
        if spelt:
            _check_release(apply)
        if spelt and "sanitize_control_tokens" in parameters:
            ids = apply(read, tokenize=True, return_dict=False, sanitize_control_tokens=True, **arguments)
        else:
            ids = self.encode(text, add_special_tokens=False)
        return text, ids

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        """Matches the text of any added token."""
        texts = sorted(self.native.get_added_vocab(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def _spells_special(self, value: Any) -> bool:
        """Whether any text inside `value` contains a special token, which only the template may write."""
        if isinstance(value, str):
            return self._special_text.search(value) is not None
        if isinstance(value, Mapping):
            return any(map(self._spells_special, value.values()))
        return isinstance(value, (list, tuple)) and any(map(self._spells_special, value))

    def vocabulary(self, size: int, eos_token_ids: Sequence[int]) -> HfVocabulary:
        file = self.setup.folder / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer as Backend

            backend: Any = Backend.from_file(str(file))
        elif self._backend is not None:
            backend = type(self._backend).from_str(self._backend.to_str())
        else:
            raise ValueError("grammars need a tokenizer with a tokenizer.json form, and this one has none")
        if not eos_token_ids and self.eos_token_id is not None:
            eos_token_ids = [self.eos_token_id]
        return HfVocabulary(backend, size, eos_token_ids)

    def describe(self) -> dict[str, Any]:
        found = self.native
        settings = {name: value for name, value in found.init_kwargs.items() if not _LOCAL_SETTING.search(name)}
        settings |= {"tokenizer_class": type(found).__name__, "chat_template": found.chat_template}
        plain: dict[str, Any] = json.loads(json.dumps(settings, default=_added_token, skipkeys=True))
        return plain


def _load(folder: Path) -> Any:
    try:
        kind = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        kind = None
    if kind in _PLAIN_CLASSES and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _check_release(apply: Any) -> None:
    """Refuses texts of control tokens where `apply` is the library's own and takes those of a request for tokens.

    It does so before 5.20, and up to 5.22 with the arguments of a template.
    """
    import transformers

    own = getattr(apply, "__func__", None) is transformers.PreTrainedTokenizerBase.apply_chat_template
    if own and Version(transformers.__version__) < _SANITIZING:
        raise InvalidRequest(
            f"messages hold the text of a control token, which transformers {transformers.__version__} "
            f"may take for the token; serve them with transformers {_SANITIZING} or later",
            "messages",
        )


def _added_token(value: Any) -> dict[str, Any] | None:
    """An added token as `tokenizer_config.json` writes it; None for other objects that JSON does not have."""
    return {name: getattr(value, name) for name in _TOKEN_FIELDS} if hasattr(value, "single_word") else None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
