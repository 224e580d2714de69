"""Which file is read, and one sentence that names it where it cannot be."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import gguf
import pytest

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.plugin_host.model_sources import fetch_model
from frame.core.plugin_host.registry import Registry
from frame.plugins.gguf.file import GgufFile
from frame.settings import ConfigError
from frame.testing.checkpoints import make_checkpoint, write_tokenizer
from frame.testing.engines import SMALL, greedy, prompts, running
from tests.gguf.files import write_gguf
from tests.gguf.test_models import FOURS, MOE, TABLED, WIDE, expected, served


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(checkpoint with the values stored, its GGUF file)."""
    folder = tmp_path_factory.mktemp("tiny")
    plain = make_checkpoint(folder / "plain", "qwen3", num_hidden_layers=2, intermediate_size=128)
    (folder / "files").mkdir()
    return plain, write_gguf(plain, folder / "files" / "tiny-Q4_0.gguf", FOURS)


def fetched(model, cache, **settings):
    return fetch_model(from_flat({**SMALL, "model": str(model), "download_dir": str(cache), **settings}))


def refused(model, cache, **settings):
    with pytest.raises((ConfigError, ValueError, RuntimeError)) as caught:
        served(model, cache, **settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_folder_with_one_model_and_its_type_mean_the_file(tiny, tmp_path):
    plain, file = tiny
    want = expected(plain, 8)
    assert served(file.parent, tmp_path / "cache", 8) == want
    assert served(f"{file.parent}:q4_0", tmp_path / "cache", 8, load_format="gguf") == want
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_several_models_are_told_apart_by_type(tiny, tmp_path):
    plain, file = tiny
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny-Q4_0.gguf").write_bytes(file.read_bytes())
    (folder / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    (folder / "mmproj-tiny-F16.gguf").write_bytes(b"GGUF")
    assert served(f"{folder}:Q4_0", tmp_path / "cache", 8) == expected(plain, 8)
    text = refused(folder, tmp_path / "cache")
    assert f"{folder} has 2 models in GGUF files: tiny-Q4_0, tiny-Q8_0; name one, as {folder}:Q4_K_M" in text
    assert "has no GGUF file of Q5_K; there are: tiny-Q4_0, tiny-Q8_0" in refused(f"{folder}:Q5_K", tmp_path / "cache")


def test_split_files(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=2)
    write_gguf(plain, tmp_path / "m.gguf", FOURS, split=3)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) == 3
    assert served(files[1], tmp_path / "cache", 8) == expected(plain, 8)
    files[2].unlink()
    assert f"{tmp_path} lacks {files[2].name}, one of the 3 files" in refused(files[0], tmp_path / "cache")


@pytest.mark.matrix
def test_two_ranks_hold_half_each(tiny, tmp_path):
    plain, file = tiny
    assert served(file, tmp_path, 8, tensor_parallel_size=2) == expected(plain, 8)


@pytest.mark.matrix
def test_two_ranks_hold_half_each_of_blocks_of_tables(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "llama-tied", **(WIDE | {"hidden_size": 512, "num_attention_heads": 8}))
    file = write_gguf(plain, tmp_path / "m.gguf", TABLED)
    assert served(file, tmp_path, 8, tensor_parallel_size=2) == expected(plain, 8)


@pytest.mark.matrix
def test_a_share_that_cuts_blocks_is_refused(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=1, hidden_size=64, intermediate_size=32)
    file = write_gguf(plain, tmp_path / "m.gguf", FOURS)
    assert "which cut blocks of 32 (Q8_0); divide the model over fewer" in refused(file, tmp_path / "c",
                                                                                 tensor_parallel_size=2)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", FOURS),
        ("qwen3-moe", [("attn_|_exps", "Q5_1")]),
        ("qwen3-moe", [("attn_|_exps", "MXFP4")]),
        pytest.param("llama-tied", [("attn_|ffn_|token_embd", "IQ4_XS")], marks=pytest.mark.matrix),
        pytest.param("llama-tied", [("attn_|ffn_|token_embd", "IQ4_NL")], marks=pytest.mark.matrix),
    ],
)
def test_made_up_weights_are_finite(family, kinds, tmp_path):
    plain = make_checkpoint(tmp_path / "plain", family, **(MOE if family == "qwen3-moe" else WIDE))
    file = write_gguf(plain, tmp_path / "m.gguf", kinds)
    first, second = (served(file, tmp_path / "cache", 8, load_format="dummy") for _ in range(2))
    assert first == second
    assert 0 not in {token for row in first for token in row}  # which would be the best of logits that are no numbers


def test_values_are_computed_in_the_type_of_the_file(tiny, tmp_path):
    checkpoint = read_checkpoint(fetched(tiny[1], tmp_path))
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.quantization == {"quant_method": "gguf", "default": "Q8_0"}
    assert checkpoint.folder.parent == tmp_path
    halves = write_gguf(tiny[0], tmp_path / "half.gguf", [("weight", "F16")])
    checkpoint = read_checkpoint(fetched(halves, tmp_path))
    assert (checkpoint.dtype, checkpoint.quantization) == ("float16", None)


def test_requests_ask_for_the_model_as_it_was_named(tiny, tmp_path):
    assert fetched(tiny[1], tmp_path).model.served_model_name == [str(tiny[1])]


def test_the_tokenizer_is_the_files_or_the_one_that_is_named(tiny, tmp_path):
    plain, _ = tiny
    texts = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 2,
             "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.merges": ["a b"],
             "tokenizer.ggml.tokens": [*"abcdefg", "ab", *(f"[{n}]" for n in range(504))]}  # fmt: skip
    file = write_gguf(plain, tmp_path / "t.gguf", FOURS, more=texts)
    config = fetched(file, tmp_path / "cache")
    checkpoint = read_checkpoint(config)
    assert checkpoint.eos_token_ids[:2] == [2, 5]
    from frame.core.front.tokenizer import TokenizerSource

    assert TokenizerSource(config, checkpoint, Registry.load()).get().encode("abc") == [7, 2]
    write_tokenizer(tmp_path)
    named = fetched(file, tmp_path / "cache", tokenizer=str(tmp_path))
    assert TokenizerSource(named, checkpoint, Registry.load()).get().encode("abc") != [7, 2]


def test_a_truncated_file_is_named(tiny, tmp_path):
    data = tiny[1].read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(data[: len(data) - 1000])
    assert f"{short} cannot be read as GGUF: it is truncated: tensor " in refused(short, tmp_path / "cache")
    for size in (1, 10, 40, 300, 2000):
        short.write_bytes(data[:size])
        assert str(short) in refused(short, tmp_path / "cache")
        assert "truncated" in refused(short, tmp_path / "cache")
    short.write_bytes(b"")
    assert str(short) in refused(short, tmp_path / "cache")


def test_what_is_no_gguf_file_is_named(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4" + bytes(100))
    assert f"{other} cannot be read as GGUF: it begins with b'PK" in refused(other, tmp_path / "cache")
    other.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    assert "frame reads little-endian files of versions 2 and 3" in refused(other, tmp_path / "cache")


def test_an_unknown_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = refused(tmp_path / "odd.gguf", tmp_path / "cache")
    assert f"{tmp_path / 'odd.gguf'}: it holds a model of the architecture 'rwkv6'; frame reads of GGUF: llama" in text


def test_an_unknown_type_is_named(tiny, tmp_path):
    data = bytearray(tiny[1].read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (2,)
    for number, called in ((40, "NVFP4"), (9, "Q8_1"), (77, "number 77")):
        struct.pack_into("<I", data, at, number)
        (tmp_path / "odd.gguf").write_bytes(data)
        text = refused(tmp_path / "odd.gguf", tmp_path / "cache")
        assert (
            f"odd.gguf cannot be read as GGUF: tensor blk.0.attn_q.weight has type {called}; frame reads: F32" in text
        )


def test_an_unknown_tensor_is_named(tiny, tmp_path):
    data = tiny[1].read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight")
    (tmp_path / "odd.gguf").write_bytes(data)
    text = refused(tmp_path / "odd.gguf", tmp_path / "cache")
    assert "odd.gguf: tensor 'blk.0.attn_z.weight' has no place in a model of its architecture" in text


def test_a_folder_without_gguf_files_is_as_before(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_checkpoint(fetched(tmp_path, tmp_path / "cache"))


def test_damaged_headers_never_escape(tiny, tmp_path):
    """Every byte of the header may be wrong: what comes is a `ValueError`, or a header."""
    data, draw = tiny[1].read_bytes(), random.Random(5)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(1500)] = draw.randrange(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        with suppress(ValueError):
            GgufFile(tmp_path / "damaged.gguf")


def test_long_rope_and_yarn_are_settings(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "llama-yarn")
    file = write_gguf(plain, tmp_path / "m.gguf", FOURS)
    with running(fetched(file, tmp_path / "cache"), Registry.load()) as engine:
        assert greedy(engine, prompts(512), 8) == expected(plain, 8)
