"""Checkpoints in the form of Mistral's own tools give the tokens of the same model in transformers' form."""

from __future__ import annotations

import base64
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.plugin_host.model_sources import fetch_model
from frame.core.plugin_host.registry import Registry
from frame.settings import ConfigError
from frame.testing.checkpoints import make_checkpoint
from tests.gguf.test_models import expected, served

#: transformers' parts → those of the files.
PARTS = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "block_sparse_moe": "feed_forward", "mlp.gate": "feed_forward.gate",
    "mlp.experts": "feed_forward.experts",
}  # fmt: skip


def write_consolidated(plain, folder, num_files=1, **changes):
    """The checkpoint `plain` in Mistral's form, its weights in so many files."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    heads = {"wq": config["num_attention_heads"], "wk": config["num_key_value_heads"]}
    stored = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        new = re.sub(r"^model\.layers", "layers", name)
        for old in sorted(PARTS, key=len, reverse=True):
            new = re.sub(rf"(^|\.){re.escape(old)}(?=\.)", rf"\g<1>{PARTS[old]}", new, count=1)
        if count := heads.get(new.split(".")[-2], 0):
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        stored[new] = tensor.contiguous()
    names = sorted(stored)
    for number in range(num_files):
        end = "" if num_files == 1 else f"-{number + 1:05d}-of-{num_files:05d}"
        save_file({name: stored[name] for name in names[number::num_files]}, folder / f"consolidated{end}.safetensors")
    values = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"], "n_heads": heads["wq"], "n_kv_heads": heads["wk"],
        "norm_eps": config["rms_norm_eps"], "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"], "sliding_window": config["sliding_window"],
        "max_position_embeddings": config["max_position_embeddings"],
    }  # fmt: skip
    if "num_local_experts" in config:
        values["moe"] = {"num_experts": config["num_local_experts"], "num_experts_per_tok": 2}
    (folder / "params.json").write_text(json.dumps({**values, **changes}))
    return folder


@pytest.mark.some(1)
@pytest.mark.parametrize(("family", "num_files", "ranks"), [("mistral", 2, 1), ("mistral", 1, 2), ("mixtral", 1, 1)])
def test_tokens_are_those_of_transformers(family, num_files, ranks, tmp_path):
    plain = make_checkpoint(tmp_path / "plain", family)
    if family == "mixtral":
        split_experts(plain)
    folder = write_consolidated(plain, tmp_path / "own", num_files)
    assert served(folder, tmp_path / "cache", 12, tensor_parallel_size=ranks) == expected(plain, 12)


def split_experts(plain):
    """Puts the experts of a checkpoint into tensors of their own, as the files have them."""
    apart = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                base = name.removesuffix("gate_up_proj")
                apart |= {f"{base}{expert}.w1.weight": gate.contiguous(), f"{base}{expert}.w3.weight": up.contiguous()}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            apart |= {f"{base}{expert}.w2.weight": matrix.contiguous() for expert, matrix in enumerate(tensor)}
        else:
            apart[name] = tensor
    save_file(apart, plain / "model.safetensors", {"format": "pt"})


def test_both_forms_in_one_folder(tmp_path):
    """config.json decides what is computed, and --load-format which copy of the weights is read."""
    plain = make_checkpoint(tmp_path / "plain", "mistral")
    own = write_consolidated(plain, tmp_path / "own")
    for file in own.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    want = expected(plain, 8)
    assert served(plain, tmp_path / "cache", 8) == want
    assert served(plain, tmp_path / "cache", 8, load_format="mistral") == want
    assert not (tmp_path / "cache").exists()


def test_tekken_tokens(tmp_path):
    folder = write_consolidated(make_checkpoint(tmp_path / "plain", "mistral"), tmp_path / "own")
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    vocabulary = [
        {"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode(), "token_str": chr(n) if n < 128 else None}
        for n in range(256)
    ]
    vocabulary.append({"rank": 256, "token_bytes": base64.b64encode(b"he").decode(), "token_str": "he"})
    tekken = {
        "config": {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": 257, "default_vocab_size": 277,
                   "default_num_special_tokens": 20, "version": "v3"},
        "vocab": vocabulary,
        "special_tokens": [{"rank": n, "token_str": text, "is_control": True} for n, text in enumerate(special)],
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps(tekken))
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    from frame.core.front.tokenizer import TokenizerSource

    want = Tekkenizer.from_file(folder / "tekken.json")
    config = fetch_model(from_flat({"model": str(folder), "download_dir": str(tmp_path / "cache")}))
    checkpoint = read_checkpoint(config)
    assert checkpoint.eos_token_ids == [2]
    tokenizer = TokenizerSource(config, checkpoint, Registry.load()).get()
    for text in ("he hehe", "Größe 😀"):
        ids = want.encode(text, bos=False, eos=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("hehe", add_special_tokens=False)) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dim": None}, "params.json must state dim as an integer, got None"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "params.json states quantization, which frame does not"),
        ({"sliding_window": [24, None]}, "params.json states a sliding_window for each layer"),
    ],
)
def test_what_is_not_read_is_named(changes, sentence, tmp_path):
    folder = write_consolidated(make_checkpoint(tmp_path / "plain", "mistral"), tmp_path / "own", **changes)
    with pytest.raises(ConfigError, match="params") as caught:
        fetch_model(from_flat({"model": str(folder), "download_dir": str(tmp_path / "cache")}))
    assert sentence in str(caught.value)


def test_a_tensor_in_two_files_is_named(tmp_path):
    folder = write_consolidated(make_checkpoint(tmp_path / "plain", "mistral"), tmp_path / "own")
    save_file({"norm.weight": torch.ones(64)}, folder / "consolidated-2.safetensors")
    with pytest.raises(ValueError, match=r"holds the tensor norm\.weight, which is in consolidated"):
        served(folder, tmp_path / "cache", 1)
