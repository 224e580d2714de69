"""Checkpoints with quantised weights are served as transformers serves their dequantised twins, token for token."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.cli.main import main
from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.offline.in_process import make_engine
from frame.ops import quantize_rows
from frame.plugins.quantization.names import Names
from frame.plugins.quantization.online import group_for
from frame.plugins.quantization.packed import round_groups
from frame.testing import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.model_suite import continue_greedily
from frame.testing.thread_executor import with_threads
from tests.plugins.quantization.stored import compressed, write_pair

NUM_TOKENS = 24


def of(bits, type_, strategy, **more):
    return {"num_bits": bits, "type": type_, "strategy": strategy, **more}


TOKENS, BYTES = of(8, "float", "token", dynamic=True), of(8, "int", "token", dynamic=True)
STATIC = of(8, "float", "tensor", dynamic=False)
#: Format, input_activations and weights of a config group.
FORMATS = {
    "fp8 by tensor, static": ("float-quantized", STATIC, of(8, "float", "tensor")),
    "fp8 by channel": ("float-quantized", TOKENS, of(8, "float", "channel")),
    "fp8 by block": ("float-quantized", TOKENS, of(8, "float", "block", block_structure=[32, 32])),
    "mxfp8": ("mxfp8-quantized", None, of(8, "float", "group", group_size=32, scale_dtype="torch.uint8")),
    "int8": ("int-quantized", BYTES, of(8, "int", "channel")),
    "int8 asymmetric": ("int-quantized", BYTES, of(8, "int", "channel", symmetric=False)),
    "w4a16": ("pack-quantized", None, of(4, "int", "group", group_size=16)),
    "w4a16 asymmetric": ("pack-quantized", None, of(4, "int", "group", group_size=32, symmetric=False)),
    "w4a16 by channel": ("pack-quantized", None, of(4, "int", "channel")),
    "w4a16 ordered": ("pack-quantized", None, of(4, "int", "group", group_size=16, actorder="group")),
    "w8a16": ("pack-quantized", None, of(8, "int", "group", group_size=16)),
    "w8a16 asymmetric": ("pack-quantized", None, of(8, "int", "channel", symmetric=False)),
}


def held_bytes(worker):
    return sum(parameter.nbytes for parameter in worker.model.parameters())


def served(folder, count=NUM_TOKENS, **settings):
    with running(from_flat({**SMALL, "model": str(folder), **settings}), Registry.load()) as engine:
        return greedy(engine, prompts(512), count)


def expected(folder, count=NUM_TOKENS):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [continue_greedily(model, prompt, count) for prompt in prompts(512)]


#: Formats whose traits others have.
REPEATED = ("fp8 by channel", "int8", "w4a16 by channel", "w8a16 asymmetric")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in REPEATED else []) for kind in FORMATS]
)
def test_compressed_tensors(kind, tmp_path):
    format_, inputs, weights = FORMATS[kind]
    config, quantize = compressed(format_, inputs, **weights)
    quantised, plain = write_pair(tmp_path, "llama", config, quantize)
    assert served(quantised) == expected(plain)


def fp8_quantizer(block=None, static=False, powers=None):
    """Weights as transformers' fp8 stores them: a scale that multiplies, for a tensor or a block.

    With `powers` scales are powers of two, stored as exponents of that type (`scale_fmt` ue8m0).
    """
    config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    config |= {"weight_block_size": list(block)} if block else {}

    def quantize(name, weight):
        rows, columns = weight.shape
        r, c = block or (rows, columns)
        padded = torch.nn.functional.pad(weight, (0, -columns % c, 0, -rows % r))
        blocks = padded.unflatten(1, (-1, c)).unflatten(0, (-1, r))
        scale = blocks.abs().amax((1, 3)) / 448
        if powers is not None:
            scale = scale.log2().ceil().exp2()
        spread = scale.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        found = {
            "weight": codes,
            "weight_scale_inv" if block else "weight_scale": scale if block else scale.reshape(()),
        }
        if static:
            found["input_scale"] = torch.tensor(0.01)
        if powers is not None:
            found["weight_scale_inv"] = (scale.log2() + 127).to(torch.uint8).view(powers)
        return found, codes.float() * spread

    return config, quantize


@pytest.mark.parametrize("kind", ["tensor", "static", "block", "odd block"])
def test_fp8(kind, tmp_path):
    """Also with blocks that end within a tensor, so that those of tensors that are fused do not join."""
    block = {"block": (32, 32), "odd block": (24, 40)}.get(kind)
    config, quantize = fp8_quantizer(block, static=kind == "static")
    quantised, plain = write_pair(tmp_path, "llama", config, quantize)
    assert served(quantised) == expected(plain)


@pytest.mark.parametrize("kind", ["named", "pattern", "part of a fused layer"])
def test_layers_that_are_left_as_they_are(kind, tmp_path):
    names = {
        "named": ["model.layers.1.mlp.down_proj", "layers.2"],
        "pattern": [r"re:.*layers\.1\..*"],
        "part of a fused layer": ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"],
    }[kind]
    config, quantize = compressed("pack-quantized", **FORMATS["w4a16"][2])
    ignored = Names(names)
    quantised, plain = write_pair(
        tmp_path, "llama", {**config, "ignore": ["lm_head", *names]}, quantize, ignored=lambda name: name in ignored
    )
    assert served(quantised) == expected(plain)


def test_layers_of_two_groups(tmp_path):
    """The first group that names a layer counts before those that target its class."""
    four, nibbles = compressed("pack-quantized", **FORMATS["w4a16"][2])
    eight, codes = compressed("int-quantized", FORMATS["int8"][1], **FORMATS["int8"][2])
    groups = {"every": four["config_groups"]["group_0"], "some": eight["config_groups"]["group_0"]}
    groups["some"] = {**groups["some"], "targets": [r"re:.*(v_proj|down_proj)$"]}
    config = {**four, "format": "mixed-precision", "config_groups": groups}
    quantised, plain = write_pair(
        tmp_path,
        "llama",
        config,
        lambda name, weight: (codes if name.endswith(("v_proj", "down_proj")) else nibbles)(name, weight),
    )
    assert served(quantised) == expected(plain)


@pytest.mark.parametrize(("family", "powers"), [("llama", torch.uint8), ("qwen3-moe", torch.float8_e8m0fnu)], ids=str)
def test_fp8_with_scales_that_are_exponents(family, powers, tmp_path):
    """Of layers that are fused, and of experts; bytes, and the type that safetensors has for them."""
    config, quantize = fp8_quantizer((16, 32), powers=powers)
    quantised, plain = write_pair(tmp_path, family, {**config, "scale_fmt": "ue8m0"}, quantize)
    assert served(quantised) == expected(plain)


@pytest.mark.parametrize("kind", ["fp8", "fp8 block", "w4a16"])
def test_experts(kind, tmp_path):
    if kind == "w4a16":
        config, quantize = compressed("pack-quantized", **FORMATS["w4a16"][2])
        config["ignore"] = ["lm_head", r"re:.*mlp\.gate$"]
    else:
        config, quantize = fp8_quantizer((16, 32) if kind == "fp8 block" else None)
    quantised, plain = write_pair(tmp_path, "qwen3-moe", config, quantize)
    assert served(quantised) == expected(plain)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_weights_that_are_quantised_while_they_load(name, family, tmp_path):
    """As a checkpoint gives that was quantised before in the same way."""
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(name)

    def rounded(base, weight):
        if dtype is None:
            groups = weight.shape[1] // group_for(weight.shape[1])
            codes, scales = round_groups(weight, groups)
            back = (codes.float() - 8).unflatten(1, (groups, -1)) * scales[..., None]
            return {"weight": weight}, back.flatten(1)
        codes, scales = quantize_rows(weight, dtype)
        return {"weight": weight}, codes.float() * scales

    quantised, plain = write_pair(tmp_path, family, {}, rounded)
    found = served(quantised, quantization=name, hf_overrides={"quantization_config": None})
    assert found == expected(plain)


@pytest.mark.parametrize("name", ["int8", pytest.param("fp8", marks=pytest.mark.matrix)])
def test_experts_whose_file_has_the_axes_the_other_way_round(name, tmp_path):
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[name]

    def rounded(weight):
        codes, scales = quantize_rows(weight.flatten(0, -2), dtype)
        return (codes.float() * scales).view(weight.shape)

    quantised, plain = write_pair(tmp_path, "gpt-oss", {}, lambda base, weight: ({"weight": weight}, rounded(weight)))
    twin = load_file(plain / "model.safetensors")
    experts = [key for key in twin if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert experts
    twin |= {key: rounded(twin[key].transpose(1, 2).contiguous()).transpose(1, 2).contiguous() for key in experts}
    save_file(twin, plain / "model.safetensors", {"format": "pt"})
    found = served(quantised, quantization=name, hf_overrides={"quantization_config": None})
    assert found == expected(plain)


@pytest.mark.parametrize(
    ("dropped", "renamed", "words"),
    [
        (".mlp.up_proj.weight_scale", None, "3 missing: model.layers.0.mlp.up_proj.weight_scale, "),
        (None, (".o_proj.weight_packed", ".o_proj.weight"), "3 unexpected: model.layers.0.self_attn.o_proj.weight, "),
    ],
)
def test_tensors_that_contradict_the_configuration_are_named(dropped, renamed, words, tmp_path):
    config, quantize = compressed("pack-quantized", **FORMATS["w4a16"][2])
    quantised, _ = write_pair(tmp_path, "llama", config, quantize)
    tensors = load_file(quantised / "model.safetensors")
    if dropped:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(dropped)}
    if renamed:
        tensors = {name.replace(*renamed) if name.endswith(renamed[0]) else name: one for name, one in tensors.items()}
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=words) as caught:
        served(quantised)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("strategy", "form"), [("tensor", (1,)), ("attn_head", (2, 1, 1))])
def test_the_checkpoint_says_how_the_cache_is_kept(strategy, form, tmp_path):
    """By its kv_cache_scheme and scales, of a layer or of each KV head, unless the user says another type."""
    config, quantize = compressed("float-quantized", FORMATS["fp8 by channel"][1], **FORMATS["fp8 by channel"][2])
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    names = [f"model.layers.{i}.self_attn.{part}_scale" for i in range(3) for part in "kv"]
    scales = {name: torch.full(form, 0.02) * (1 + torch.arange(form[0])).view(form) for name in names}
    quantised, _ = write_pair(tmp_path, "llama", {**config, "kv_cache_scheme": scheme}, quantize, more=scales)
    with running(from_flat({**SMALL, "model": str(quantised)}), Registry.load()) as engine:
        assert {spec.dtype for group in engine.scheduler._layout.groups for spec in group.specs} == {"float8_e4m3fn"}
        assert all(len(tokens) == 12 for tokens in greedy(engine, prompts(512)))
    with running(from_flat({**SMALL, "model": str(quantised), "kv_cache_dtype": "float32"}), Registry.load()) as engine:
        assert {spec.dtype for group in engine.scheduler._layout.groups for spec in group.specs} == {"float32"}


@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}, {"load_format": "dummy"}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_doctor_counts_the_bytes_of_the_engine(settings, ranks, tmp_path, capsys):
    """Of weights that are stored so, that become so, or that are made up; also where ranks divide them."""
    if settings.get("quantization"):
        folder = make_checkpoint(tmp_path, "qwen3-moe")
    else:
        config, quantize = compressed("pack-quantized", **{**FORMATS["w4a16"][2], "group_size": 8})
        config["ignore"].append(r"re:.*mlp\.gate$")
        folder, _ = write_pair(tmp_path, "qwen3-moe", config, quantize)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "tensor_parallel_size": ranks, **settings}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert main(["doctor", str(folder), "--memory-gib", "2", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    values = {"model": str(folder), "num_threads": 1, "kv_cache_memory_bytes": 3_000_000, **settings}
    engine = make_engine(from_flat({**values, "executor": "threads"}), with_threads(Registry.load()))
    try:
        held = engine.executor.call("run", {"function": held_bytes})
    finally:
        engine.close()
    predicted = [rank["weights_bytes"] for rank in found.get("ranks", ())] or [found["weights"]["num_bytes"]]
    assert predicted == held
    assert found["weights"]["quantization"] == (settings.get("quantization") or "compressed-tensors")


@pytest.mark.parametrize("kind", ["fp8 by tensor, static", "w4a16 asymmetric", "w4a16 ordered"])
def test_two_ranks_give_the_tokens_of_one(kind, tmp_path):
    format_, inputs, weights = FORMATS[kind]
    weights = {**weights, **({"group_size": 16} if weights.get("group_size") else {})}
    config, quantize = compressed(format_, inputs, **weights)
    quantised, plain = write_pair(tmp_path, "llama", config, quantize)
    values = {**SMALL, "model": str(quantised), "tensor_parallel_size": 2, "executor": "threads"}
    engine = make_engine(from_flat(values), with_threads(Registry.load()))
    try:
        assert greedy(engine, prompts(512), NUM_TOKENS) == expected(plain)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["fp8 by block", "int8 asymmetric", "w4a16 asymmetric", "w4a16 ordered", "w8a16"])
def test_made_up_weights(kind, tmp_path):
    format_, inputs, weights = FORMATS[kind]
    config, quantize = compressed(format_, inputs, **weights)
    quantised, _ = write_pair(tmp_path, "llama", config, quantize)
    assert all(len(tokens) == 12 for tokens in served(quantised, 12, load_format="dummy"))


@pytest.mark.parametrize("kind", ["modelopt", "mxfp4", "bitsandbytes"])
def test_tables_of_codes_are_whole_again_after_sleep_dropped_the_weights(kind, tmp_path):
    config = {
        "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    }[kind]
    folder = make_checkpoint(tmp_path, "gpt-oss" if kind == "mxfp4" else "llama", intermediate_size=128)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    settings = {**SMALL, "model": str(folder), "load_format": "dummy"}
    with running(from_flat(settings), Registry.load()) as engine:
        want = greedy(engine, prompts(512), 8)
        engine.call("sleep", {"keep": []})
        engine.call("wake_up")
        assert greedy(engine, prompts(512), 8) == want
