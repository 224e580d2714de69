"""Rotary frequencies and factors equal transformers' for every variant and both spellings of the configuration."""

from types import SimpleNamespace

import pytest
import torch

from frame.layers.rotary import rope_frequencies, rope_parameters

VARIANTS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 16 for i in range(16)],
        "long_factor": [2.0 + i for i in range(16)],
    },
}
EXTRA = [
    ("yarn", {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 20, "beta_slow": 2}),
    ("yarn", {"attention_factor": 1.25}),
    ("longrope", {"attention_factor": 1.5}),
    ("longrope", {"factor": 16.0}),
    ("linear", {"partial_rotary_factor": 0.5}),
    ("proportional", {}),
    ("proportional", {"partial_rotary_factor": 0.3}),
    ("proportional", {"partial_rotary_factor": 0.25, "factor": 2.0}),
]


def llama_config(variant, **parameters):
    from transformers import AutoConfig

    values = {**VARIANTS.get(variant, {}), **parameters, "rope_type": variant, "rope_theta": 5000.0}
    return AutoConfig.for_model(
        "llama",
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=values,
    )


@pytest.mark.parametrize(("variant", "parameters"), [*((name, {}) for name in VARIANTS), *EXTRA])
@pytest.mark.parametrize("max_model_len", [48, 700])
def test_equals_transformers(variant, parameters, max_model_len):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = llama_config(variant, **parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[variant](config, torch.device("cpu"), seq_len=max_model_len)
    frequencies, scale = rope_frequencies(config, 32, max_model_len)
    torch.testing.assert_close(frequencies, expected, rtol=2e-6, atol=0)
    assert scale == pytest.approx(factor)


def test_default_equals_the_formula():
    frequencies, scale = rope_frequencies(llama_config("default"), 32, 256)
    torch.testing.assert_close(frequencies, 5000.0 ** -(torch.arange(0, 32, 2) / 32))
    assert scale == 1.0


def test_old_spelling_of_the_configuration():
    old = SimpleNamespace(
        rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 4.0}, max_position_embeddings=256
    )
    new = llama_config("linear")
    torch.testing.assert_close(rope_frequencies(old, 32, 256)[0], rope_frequencies(new, 32, 256)[0])


def test_original_length_beside_the_rope_settings():
    config = SimpleNamespace(rope_scaling={"type": "su"}, original_max_position_embeddings=77)
    assert rope_parameters(config)["original_max_position_embeddings"] == 77


def test_settings_per_layer_type():
    config = SimpleNamespace(
        rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        max_position_embeddings=64,
    )
    full = rope_frequencies(config, 16, 64, "full_attention")[0]
    sliding = rope_frequencies(config, 16, 64, "sliding_attention")[0]
    assert full[-1] == pytest.approx(1e6 ** -(14 / 16))
    assert sliding[-1] == pytest.approx(1e4 ** -(14 / 16))


def test_unknown_variant_names_the_choices():
    config = SimpleNamespace(rope_parameters={"rope_type": "helix"}, max_position_embeddings=64)
    with pytest.raises(ValueError, match="no rope variant 'helix'; there are: default, dynamic, linear"):
        rope_frequencies(config, 16, 64)
