"""Families that transformers has no class of: logits equal those of a reference written here, in plain float32."""

import json
import random
from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from frame import LLM, SamplingParams
from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.plugin_host.model_choice import read_model_config
from frame.core.plugin_host.registry import Registry
from frame.plugins.models import baichuan
from tests.models.dense import make_model, run

IDS = random.Random(1).choices(range(3, 128), k=40)
WIDTH, HEADS, INNER, WORDS, LAYERS = 48, 6, 80, 128, 3
DIM = WIDTH // HEADS


def draw(shapes):
    torch.manual_seed(0)
    return {
        name: torch.randn(shape) * (0.1 if len(shape) == 1 else 0.3) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write(folder, tensors, **values):
    save_file(tensors, folder / "model.safetensors")
    shared = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": INNER}
    (folder / "config.json").write_text(json.dumps({**shared, **values}))
    return read_model_config(read_checkpoint(from_flat({"model": str(folder)})), Registry.load())


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x, base):
    """x [T, heads, DIM], each pair (i, i + DIM / 2) turned by position · base^(-2i / DIM)."""
    places = torch.arange(len(x), dtype=torch.float64)[:, None]
    angles = (places * base ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)).float()[:, None]
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


def attend(query, key, value, bias):
    """Causal attention of [T, heads, DIM], with `bias` [heads, T, T] on its scores; keys of fewer heads repeat."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5 + bias
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value).flatten(1)


def llama(x, layers, base, *, branch=1.0, bias=0.0):
    """The residual stream [T, WIDTH] through layers (norm 1, q, k, v, o, norm 2, gate, up, down)."""
    for norm1, q, k, v, o, norm2, gate, up, down in layers:
        normed = rms(x, norm1)
        query, key, value = ((normed @ weight.T).unflatten(1, (-1, DIM)) for weight in (q, k, v))
        if base:
            query, key = turn(query, base), turn(key, base)
        x = x + branch * (attend(query, key, value, bias) @ o.T)
        normed = rms(x, norm2)
        x = x + branch * ((functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T)
    return x


def assert_equal(folder, config, expected):
    for chunks in ([40], [13, 20, 1, 1, 1, 4]):
        logits = run(make_model(folder, config=config), IDS, chunks)
        assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()
    with closing(LLM(str(folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=40)) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": IDS}, sampling, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == int(expected[-1].argmax())


def test_exaone(tmp_path):
    shapes = {"transformer.wte.weight": (WORDS, WIDTH), "transformer.ln_f.weight": (WIDTH,)}
    shapes["lm_head.weight"] = (WORDS, WIDTH)
    sizes = {
        "ln_1": (WIDTH,), "attn.attention.q_proj": (WIDTH, WIDTH), "attn.attention.k_proj": (2 * DIM, WIDTH),
        "attn.attention.v_proj": (2 * DIM, WIDTH), "attn.attention.out_proj": (WIDTH, WIDTH), "ln_2": (WIDTH,),
        "mlp.c_fc_0": (INNER, WIDTH), "mlp.c_fc_1": (INNER, WIDTH), "mlp.c_proj": (WIDTH, INNER),
    }  # fmt: skip
    shapes |= {f"transformer.h.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in sizes.items()}
    tensors = draw(shapes)
    config = write(
        tmp_path, tensors, model_type="exaone", architectures=["ExaoneForCausalLM"], num_layers=LAYERS,
        num_key_value_heads=2, layer_norm_epsilon=1e-6, activation_function="silu", max_position_embeddings=256,
        rope_theta=500.0, tie_word_embeddings=False,
    )  # fmt: skip
    layers = [[tensors[f"transformer.h.{i}.{name}.weight"] for name in sizes] for i in range(LAYERS)]
    x = llama(tensors["transformer.wte.weight"][IDS], layers, 500.0)
    assert_equal(tmp_path, config, rms(x, tensors["transformer.ln_f.weight"]) @ tensors["lm_head.weight"].T)


def common(kv_heads=HEADS, joined=False):
    """Shapes of Llama's names in a layer, query, key and value in one tensor if `joined`."""
    projections = {"q_proj": HEADS * DIM, "k_proj": kv_heads * DIM, "v_proj": kv_heads * DIM}
    inputs = {"W_pack": 3 * WIDTH} if joined else projections
    return {
        "input_layernorm": (WIDTH,), **{f"self_attn.{name}": (rows, WIDTH) for name, rows in inputs.items()},
        "self_attn.o_proj": (WIDTH, WIDTH), "post_attention_layernorm": (WIDTH,), "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
    }  # fmt: skip


def llama_tensors(sizes, tied):
    shapes = {"model.embed_tokens.weight": (WORDS, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {} if tied else {"lm_head.weight": (WORDS, WIDTH)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in sizes.items()}
    return draw(shapes)


def test_minicpm(tmp_path):
    sizes = common(2)
    tensors = llama_tensors(sizes, tied=True)
    config = write(
        tmp_path, tensors, model_type="minicpm", architectures=["MiniCPMForCausalLM"], num_hidden_layers=LAYERS,
        num_key_value_heads=2, rms_norm_eps=1e-6, hidden_act="silu", max_position_embeddings=256, rope_theta=10000.0,
        scale_emb=12, scale_depth=1.4, dim_model_base=16,
    )  # fmt: skip
    layers = [[tensors[f"model.layers.{i}.{name}.weight"] for name in sizes] for i in range(LAYERS)]
    embedding = tensors["model.embed_tokens.weight"]
    x = llama(12 * embedding[IDS], layers, 10000.0, branch=1.4 / LAYERS**0.5)
    assert_equal(tmp_path, config, rms(x, tensors["model.norm.weight"]) / (WIDTH / 16) @ embedding.T)


@pytest.mark.parametrize("name", ["num_experts", "sparse_config"])
def test_other_minicpms_are_refused(name, tmp_path):
    config = write(
        tmp_path, llama_tensors(common(), tied=True), model_type="minicpm", architectures=["MiniCPMForCausalLM"],
        num_hidden_layers=LAYERS, max_position_embeddings=256, rms_norm_eps=1e-6, **{name: {"a": 1}},
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"MiniCPM with {name}="):
        make_model(tmp_path, config=config)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("unit_head", [False, True])
def test_baichuan(alibi, unit_head, tmp_path, monkeypatch):
    monkeypatch.setattr(baichuan, "ALIBI_WIDTH", WIDTH if alibi else WIDTH + 1)
    monkeypatch.setattr(baichuan, "UNIT_HEAD_WORDS", WORDS if unit_head else WORDS + 1)
    sizes = common(joined=True)
    tensors = llama_tensors(sizes, tied=False)
    length = {"model_max_length": 256} if alibi else {"max_position_embeddings": 256, "model_max_length": 128}
    config = write(
        tmp_path, tensors, model_type="baichuan", architectures=["BaichuanForCausalLM"], num_hidden_layers=LAYERS,
        rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, **length,
    )  # fmt: skip
    layers = []
    for i in range(LAYERS):
        norm1, joined, *others = (tensors[f"model.layers.{i}.{name}.weight"] for name in sizes)
        layers.append([norm1, *joined.chunk(3), *others])
    places = torch.arange(len(IDS))
    # of six heads: four by quarters of 8, two by every second eighth
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    bias = slopes[:, None, None] * (places[None, :] - places[:, None]) if alibi else 0.0
    x = llama(tensors["model.embed_tokens.weight"][IDS], layers, 0 if alibi else 10000.0, bias=bias)
    head = tensors["lm_head.weight"]
    head = head / head.norm(dim=1, keepdim=True) if unit_head else head
    assert_equal(tmp_path, config, rms(x, tensors["model.norm.weight"]) @ head.T)
