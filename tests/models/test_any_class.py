"""Every class that transformers generates with and that can be made tiny runs here as the table in the docs says."""

import pytest

from tests.models.any_class import generated, read_table, reference, write_checkpoint

#: One class for each trait that a wrapped model must get right; `make matrix` runs the others.
TRAITS = (
    "CohereForCausalLM",  # logits are scaled behind the head
    "DeepseekV3ForCausalLM",  # values are narrower than keys, experts are merged, a router has a bias
    "DiffLlamaForCausalLM",  # a layer calls attention twice
    "Gemma3nForCausalLM",  # layers share keys and values
    "GptOssForCausalLM",  # sinks, windows, and experts that stay the class's own
    "GPTNeoXForCausalLM",  # joined query, key and value
    "OPTForCausalLM",  # positions count from 2
    "RobertaForCausalLM",  # a head with a layer and a tied bias, positions behind padding
    "BloomForCausalLM",  # no attention of frame's: computed anew
    "MambaForCausalLM",  # a state
)
ROWS = [row for row in read_table() if row[2] in ("wrapped", "recomputed")]


@pytest.mark.parametrize(
    ("name", "model_type", "how"),
    [pytest.param(*row[:3], id=row[0], marks=() if row[0] in TRAITS else pytest.mark.slow) for row in ROWS],
)
def test_greedy_tokens_equal_transformers(name, model_type, how, tmp_path):
    folder = write_checkpoint(tmp_path, name, model_type)
    found, plugin = generated(folder, model_impl="transformers")
    assert found == reference(folder, name)
    assert plugin == {"wrapped": "*", "recomputed": "*recomputed"}[how]


def test_nine_of_ten_classes_run():
    made = [row for row in read_table() if row[2] != "not made"]
    assert len(made) > 130
    assert len(ROWS) >= 0.9 * len(made), [row for row in made if row not in ROWS]


def test_traits_are_in_the_table():
    assert set(TRAITS) <= {row[0] for row in ROWS}
