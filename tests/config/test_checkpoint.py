"""Facts of a checkpoint folder, and one sentence for each way in which it can be wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frame.core.config.checkpoint import DEMO_FOLDER, find_folder, read_checkpoint
from frame.core.config.context_length import derive_max_model_len
from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16", "eos_token_id": 2}))
    return tmp_path


def read(folder, **settings):
    return read_checkpoint(FrameConfig.from_flat(model=str(folder), **settings))


def test_facts(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2], "temperature": 0.5}))
    checkpoint = read(folder, override_generation_config={"top_k": 5})
    assert checkpoint.folder == folder
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert (checkpoint.vocab_size, checkpoint.max_model_len, checkpoint.dtype) == (100, 64, "bfloat16")
    assert checkpoint.eos_token_ids == [3, 2]
    assert checkpoint.generation == {"eos_token_id": [3, 2], "temperature": 0.5, "top_k": 5}
    assert read(folder, generation_config="frame").generation == {}
    assert read(folder, generation_config="frame", override_generation_config={"top_k": 5}).generation == {"top_k": 5}


def test_generation_config_of_another_folder(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(ConfigError, match=r"no generation_config.json in .*; --generation-config names a folder"):
        read(folder, generation_config=str(other))
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    assert read(folder, generation_config=str(other)).generation == {"top_p": 0.5}


def test_nothing_heavy_is_imported(folder):
    code = (
        "import sys\nfrom frame.core.config.checkpoint import read_checkpoint\n"
        "from frame.core.config.tree import FrameConfig\n"
        f"read_checkpoint(FrameConfig.from_flat(model={str(folder)!r}))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ({"max_position_embeddings": 40}, 40),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024),
        ({"max_position_embeddings": 100, "seq_length": 50}, 50),
        ({}, 2048),
        ({"max_position_embeddings": 10, "rope_scaling": {"type": "linear", "factor": 4}}, 40),
        ({"max_position_embeddings": 10, "rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}, 25),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, 131072),
        ({"max_position_embeddings": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 10),
        (
            {
                "max_position_embeddings": 10,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8}, "sliding_attention": {}},
            },
            80,
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 10,
                "rope_scaling": {"rope_type": "linear", "factor": 8},
            },
            10,
        ),
    ],
)
def test_length_that_a_model_was_made_for(text, length):
    assert derive_max_model_len(text) == length


def test_nested_overrides_extend_the_length(folder):
    checkpoint = read(
        folder,
        hf_overrides={
            "rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768},
            "max_model_len": 131072,
        },
    )
    assert checkpoint.max_model_len == 131072
    again = read(folder, hf_overrides={"text_config": {"vocab_size": 7}})
    assert again.vocab_size == 7


def test_overrides_are_merged_not_replaced(folder):
    (folder / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2, "x": 1}}))
    checkpoint = read(folder, hf_overrides={"rope_scaling": {"factor": 3}})
    assert checkpoint.hf["rope_scaling"] == {"type": "linear", "factor": 3, "x": 1}
    assert checkpoint.max_model_len == 192


def test_user_limit(folder):
    assert read(folder, max_model_len=10).max_model_len == 10
    assert read(folder, max_model_len=-1).max_model_len == 64
    for length in (0, 1):
        with pytest.raises(ConfigError, match=f"max_model_len must be at least 2, .* got {length}$"):
            read(folder, max_model_len=length)
    with pytest.raises(ConfigError, match="max_model_len 65 is above the 64 tokens"):
        read(folder, max_model_len=65)


def test_snapshots_and_revisions(folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("models--a--b")
    for name, size in (("abc", 11), ("def", 12)):
        (root / "snapshots" / name).mkdir(parents=True)
        (root / "snapshots" / name / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": size}))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc\n")
    assert read(root).vocab_size == 11
    assert read(root, revision="def").vocab_size == 12
    with pytest.raises(ConfigError, match=r"no revision 'zzz' in .*; there are: abc, def"):
        read(root, revision="zzz")
    with pytest.raises(ConfigError, match=r"revision '\.\./x' must be a name, not a path"):
        read(root, revision="../x")


@pytest.mark.parametrize("part", [{}, {"tie_word_embeddings": False}])
def test_the_head_of_a_model_that_also_sees_is_tied_as_the_whole_says(folder, part):
    text = {"model_type": "qwen3_vl_text", "vocab_size": 512, **part}
    whole = {"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True, "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    assert read(folder).text["tie_word_embeddings"] is True


def test_defaults_that_a_folder_leaves_out(folder):
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}})
    )
    assert read(folder).vocab_size == 262208


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json in"),
        (b"{", "config.json is not valid JSON"),
        (b"\xff\xfe", "config.json is not valid JSON"),
        (b"[]", "config.json must hold a JSON object, got list"),
        (b"{}", "names no architecture"),
        (b'{"architectures": []}', "names no architecture"),
        (b'{"architectures": ["X"], "model_type": "no-such"}', "vocab_size in"),
        (b'{"architectures": ["X"], "vocab_size": -3}', "vocab_size in"),
        (b'{"architectures": ["X"], "vocab_size": 3, "text_config": 1}', "text_config in"),
        (
            b'{"architectures": ["X"], "vocab_size": 3, "n_positions": "many"}',
            "n_positions of the model must be",
        ),
    ],
)
def test_bad_folders_get_one_sentence(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read(tmp_path)
    assert str(tmp_path) in str(caught.value) or "of the model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no folder '/nope'; give the path of a checkpoint"):
        read("/nope")
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        read(tmp_path / "f")


def test_demo_is_the_demo_model_unless_there_is_such_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_folder("") == find_folder("demo") == DEMO_FOLDER
    (tmp_path / "demo").mkdir()
    assert find_folder("demo") == Path("demo")


@pytest.mark.parametrize(("name", "value"), [("hidden_size", -4), ("num_attention_heads", "x"), ("head_dim", 0.5)])
def test_sizes_that_no_model_has_are_named(folder, name, value):
    with pytest.raises(
        ConfigError, match=f"{name} in .*config.json must be a positive integer up to [0-9]+, got {value!r}"
    ):
        read(folder, hf_overrides={name: value})


@pytest.mark.parametrize(
    ("name", "most"),
    [("hidden_size", 1 << 20), ("num_hidden_layers", 4096), ("vocab_size", 1 << 24), ("num_experts", 1 << 16),
     ("max_position_embeddings", 2**31 - 1)],
)  # fmt: skip
def test_sizes_have_an_upper_bound(folder, name, most):
    (folder / "config.json").write_text(json.dumps({**LLAMA, name: most}))
    read(folder)
    (folder / "config.json").write_text(json.dumps({**LLAMA, name: most + 1}))
    with pytest.raises(ConfigError, match=f"{name} in .*config.json must be .* {most}, got {most + 1}$"):
        read(folder)


def test_numbers_that_python_cannot_turn_into_floats_get_one_sentence(folder):
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 10**400}}
    for content in ({**LLAMA, **rope}, {**LLAMA, "max_position_embeddings": 10**400}):
        (folder / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=r"up to 2147483647, got 10{40}"):
            read(folder)
    (folder / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match=r"is not valid JSON: Exceeds the limit"):
        read(folder)


@pytest.mark.parametrize("number", [10**9, "many", -1])
def test_a_number_of_classes_is_bounded(folder, number):
    (folder / "config.json").write_text(
        json.dumps({**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": number})
    )
    with pytest.raises(ConfigError, match=r"num_labels in config.json must be an integer up to"):
        read(folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "modules.json", "tokenizer.json", "chat_template.jinja", "a.safetensors"],
)
@pytest.mark.parametrize(("kind", "words"), [("pipe", "is a pipe"), ("folder", "is a folder"), ("device", "is a pipe")])
def test_what_is_no_file_is_refused_before_it_is_opened(folder, name, kind, words):
    (folder / name).unlink(missing_ok=True)
    make = {"pipe": os.mkfifo, "folder": Path.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}
    make[kind](folder / name)
    with pytest.raises(ConfigError, match=f"{re.escape(name)} {words}"):
        read(folder)


def test_a_file_of_a_hundred_megabytes_is_not_read(folder):
    with (folder / "config.json").open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(ConfigError, match=r"config.json has 100000000 bytes; such a file may have at most 16777216"):
        read(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "nothing")
    with pytest.raises(ConfigError, match=r"no config.json in"):
        read(folder)


def test_a_generation_config_that_is_named_may_be_no_pipe(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    os.mkfifo(other / "generation_config.json")
    with pytest.raises(ConfigError, match="is a pipe"):
        read(folder, generation_config=str(other))
