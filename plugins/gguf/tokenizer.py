"""The tokenizer in the metadata of a GGUF file, as tokenizer.json and tokenizer_config.json. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WORD_START = "▁"
#: Numbers of the types of tokens: those that are written out as they are, that control, that stand for a byte.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_LETTERS = r"\p{Lt}\p{Lm}\p{Lo}\p{M}"
_WORDS = rf"[\p{{Lu}}{_LETTERS}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
_CAPITALS = rf"[\p{{Lu}}{_LETTERS}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
_ENDINGS, _ANY_CASE = "'s|'t|'re|'ve|'m|'ll|'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, endings: str) -> str:
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORDS}{endings}|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}{endings}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
#: What cuts text into words before pairs are joined, by `tokenizer.ggml.pre`: patterns, one after the other.
_PATTERNS: Mapping[str, Sequence[str]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "megrez": (_QWEN2,),
    "smollm": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "tekken": (_cased(r"\p{N}", ""),),
    "gpt-4o": (_cased(r"\p{N}{1,3}", f"{_ANY_CASE}?"),),
}
#: Those that take a word which is a token as it is, and begin a text with the first token unless the file says not to.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")


def write_tokenizer(values: Mapping[str, Any], folder: Path) -> None:
    """Writes the tokenizer's files; raises `ValueError` for a kind that is not read."""
    tokens, kind = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("its metadata holds no tokenizer")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"its tokenizer is of the kind {kind!r:.80}; frame reads of GGUF: gpt2, llama")
    types = values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError("its metadata holds other numbers of tokens and of their types")
    pre = str(values.get("tokenizer.ggml.pre", "default"))
    backend = _byte_level(values, tokens, pre) if kind == "gpt2" else _by_scores(values, tokens, types)
    spaced = kind == "llama" and _adds_space(values)
    _add_tokens(backend, tokens, types, normalized=kind == "llama" and not spaced)
    named = {name: _named(values, tokens, key) for name, key in _SPECIAL.items()}
    adds_bos = values.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)
    frame = [adds_bos and named["bos_token"], values.get("tokenizer.ggml.add_eos_token") and named["eos_token"]]
    _surround(backend, *(token or "" for token in frame))
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in named.items() if token is not None},
        "clean_up_tokenization_spaces": False,
    }
    if template := values.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _named(values: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    number = values.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _adds_space(values: Mapping[str, Any]) -> bool:
    return bool(values.get("tokenizer.ggml.add_space_prefix", True))


def _byte_level(values: Mapping[str, Any], tokens: Sequence[str], pre: str) -> Any:
    """Pairs of bytes, joined in the order of the list of merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if pre not in _PATTERNS:
        raise ValueError(f"its tokenizer cuts text as {pre!r:.80}; frame reads of GGUF: {', '.join(_PATTERNS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _by_scores(values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Any:
    """Pairs of pieces, joined in the order of the scores of what they make, as SentencePiece does."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError("its tokenizer has no score for each token")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    joined = sorted(
        (-scores[number], number, cut)
        for token, number in vocabulary.items()
        if types[number] in (_NORMAL, _USER)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    merges = [(tokens[number][:cut], tokens[number][cut:]) for _, number, cut in joined]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    )
    spaced = _adds_space(values)
    replace = normalizers.Replace(" ", _WORD_START)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_START), replace]) if spaced else replace
    steps = [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return backend


def _add_tokens(backend: Any, tokens: Sequence[str], types: Sequence[int], *, normalized: bool) -> None:
    from tokenizers import AddedToken

    kinds = list(zip(tokens, types, strict=True))
    special = [token for token, kind in kinds if kind in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=normalized) for token, kind in kinds if kind == _USER])


def _surround(backend: Any, first: str, last: str) -> None:
    """Puts special tokens before and behind each text."""
    from tokenizers import processors

    if not first and not last:
        return
    parts = [f"{first}:{{}}" if first else "", "${}:{}", f"{last}:{{}}" if last else ""]
    one = " ".join(part.format("A", 0) if part.startswith("$") else part.format(0) for part in parts if part)
    two = " ".join(part.format("B", 1) if part.startswith("$") else part.format(1) for part in parts if part)
    special = [(token, backend.token_to_id(token)) for token in dict.fromkeys((first, last)) if token]
    backend.post_processor = processors.TemplateProcessing(single=one, pair=f"{one} {two}", special_tokens=special)
