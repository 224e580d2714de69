"""The tokenizer of a GGUF file gives the ids of the tokenizer that was stored in it."""

from __future__ import annotations

import io

import pytest

from frame.interfaces import TokenizerSetup
from frame.plugins.gguf.tokenizer import _PATTERNS, write_tokenizer
from frame.plugins.tokenizers.hf import HfTokenizer

CORPUS = [
    "The quick brown fox jumps over 1234 lazy dogs, and isn't it nice? It's 3.14159!",
    "Überraschung: naïve café, straße, ΑΒΓ αβγ, русский текст, 日本語のテキスト, 한국어.",
    "def function(x):\n    return {'a': x + 1,\n\t'b': [x] * 20}\r\n\r\n\n   trailing   ",
    "I'LL go WE'VE seen HELLO World camelCaseWords snake_case_words 2024/12/31",
] * 4
TEXTS = [*CORPUS[:4], "", " ", "  two  spaces", "line\n\n\nlines", "🙂 emoji 👩‍👩‍👧", "a" * 50, "don't DON'T 12345678"]


def loaded(values, folder):
    write_tokenizer(values, folder)
    tokenizer = HfTokenizer(TokenizerSetup(folder))
    tokenizer.load()
    return tokenizer


def byte_level(pattern):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def stored_bpe(tokenizer, pre):
    import json

    model = json.loads(tokenizer.to_str())["model"]
    names = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [name for name, _ in names],
        "tokenizer.ggml.token_type": [3 if name == "<|end|>" else 1 for name, _ in names],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|end|>"),
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id("<|end|>"),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


#: The patterns of tokenizers that are published: those of the models themselves.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PUBLISHED = {"llama-bpe": LLAMA3, "qwen2": LLAMA3.replace("{1,3}", ""), "tekken": TEKKEN, "gpt-2": GPT2}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_pairs(pre, tmp_path):
    stored = byte_level(PUBLISHED[pre])
    values = {**stored_bpe(stored, pre), "tokenizer.ggml.add_bos_token": False}
    tokenizer = loaded(values, tmp_path)
    for text in TEXTS:
        want = stored.encode(text).ids
        assert tokenizer.encode(text) == want
        assert tokenizer.decode(want) == stored.decode(want)
    assert tokenizer.encode("a<|end|>b")[1] == stored.token_to_id("<|end|>")
    assert tokenizer.eos_token_id == stored.token_to_id("<|end|>")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_a_first_token_is_added_where_the_model_had_one(tmp_path):
    stored = byte_level(LLAMA3)
    end = stored.token_to_id("<|end|>")
    (tmp_path / "llama").mkdir()
    assert loaded(stored_bpe(stored, "llama-bpe"), tmp_path / "llama").encode("fox")[0] == end
    (tmp_path / "qwen").mkdir()
    assert loaded(stored_bpe(stored, "qwen2"), tmp_path / "qwen").encode("fox")[0] != end


def pieces(**settings):
    """A SentencePiece model by pairs, and what a GGUF file stores of it."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, vocab_size=450, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, **settings,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    count = range(model.vocab_size())
    kinds = [
        2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n)
        else 4 if model.id_to_piece(n) in settings.get("user_defined_symbols", ()) else 1
        for n in count
    ]  # fmt: skip
    return model, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(n) for n in count],
        "tokenizer.ggml.scores": [model.get_score(n) for n in count],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": settings["add_dummy_prefix"],
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_joined_by_score(prefix, tmp_path):
    more = {} if prefix else {"user_defined_symbols": ["<turn>", "▁▁", "▁▁▁"]}
    model, values = pieces(add_dummy_prefix=prefix, **more)
    tokenizer = loaded(values, tmp_path)
    for text in TEXTS:
        want = model.encode(text)
        if text:
            assert tokenizer.encode(text) == [1, *want], text
            assert tokenizer.decode(want) == model.decode(want)
    if not prefix:
        text = "a<turn>b   c"
        assert tokenizer.encode(text) == [1, *model.encode(text)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer.ggml.pre": "odd"}, "its tokenizer cuts text as 'odd'; frame reads of GGUF: default, gpt-2"),
        ({"tokenizer.ggml.model": "bert"}, "its tokenizer is of the kind 'bert'; frame reads of GGUF: gpt2, llama"),
        ({"tokenizer.ggml.tokens": []}, "its metadata holds no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer has no score for each token"),
    ],
)
def test_what_cannot_be_read_is_named(changes, sentence, tmp_path):
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.pre": "qwen2"}
    with pytest.raises(ValueError, match="tokenizer") as caught:
        write_tokenizer({**values, **changes}, tmp_path)
    assert sentence in str(caught.value)


def test_every_pattern_is_a_regular_expression():
    from tokenizers import Regex

    assert all(Regex(pattern) for some in _PATTERNS.values() for pattern in some)
