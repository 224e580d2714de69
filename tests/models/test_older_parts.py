"""Parts of older families, against transformers' own: slopes, norms of each head, positions of sines."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frame.plugins.models.added_positions import alibi_slopes
from frame.plugins.models.classic import ParallelLayer
from frame.plugins.models.head_norms import EachHeadNorm
from frame.plugins.models.mixture import Scaled
from frame.testing.checkpoints import make_checkpoint
from frame.testing.ranks import run_ranks
from tests.layers.test_sharding import load, make_build
from tests.models.dense import make_model, run

IDS = list(range(3, 43))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 71, 112])
def test_slopes_of_any_number_of_heads(num_heads):
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    torch.testing.assert_close(alibi_slopes(num_heads), _get_alibi_slopes(num_heads, torch.device("cpu")))
    for highest in (8, 16):  # transformers' MPT has no other highest slope in its model, only in this function
        distances = build_mpt_alibi_tensor(num_heads, 5, alibi_bias_max=highest)
        torch.testing.assert_close(-alibi_slopes(num_heads, highest), distances[:, 0, 3])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_norms_of_each_head(apart, size):
    torch.manual_seed(0)
    weight, x = torch.randn(2, 8), torch.randn(5, 2, 8)
    tensors = {f"q.norms.{head}.weight": row for head, row in enumerate(weight)} if apart else {"q.weight": weight}
    expected = nn.functional.layer_norm(x, (8,), eps=1e-3) * weight

    def work(group):
        norm = load(EachHeadNorm(make_build(group), "q", 2, 8, eps=1e-3, apart=apart), tensors)
        mine = slice(norm.first, norm.first + norm.count)
        return mine, norm(x[:, mine])

    for rank, (mine, found) in enumerate(run_ranks(size, work)):
        assert mine.start == rank * 2 // size
        torch.testing.assert_close(found, expected[:, mine])


REFUSED = [
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine must be true"),
    ("falcon-40b", {"parallel_attn": False}, "parallel_attn must be true with new_decoder_architecture"),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn must be 1 in this Falcon"),
    ("falcon-40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn must be 1 or 2 in this Falcon"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln of MPT's attention must be False, the checkpoint has True"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi of MPT's attention must be True, the checkpoint has False"),
    ("mpt", {"logit_scale": 0.5}, "logit_scale of MPT must be None, the checkpoint has 0.5"),
    ("mpt", {"no_bias": False}, "no_bias of MPT must be True, the checkpoint has False"),
    ("gptj", {"rotary_dim": 0}, "rotary_dim must be from 1 to the head size 16, got 0"),
    ("codegen", {"n_head": 2}, "2 heads do not divide into 4 groups"),
    ("phi", {"hidden_act": "mish"}, "no activation 'mish'; there are: gelu, "),
    ("cohere", {"hidden_act": "mish"}, "no gated activation 'mish'; there are: "),
    ("gpt2", {"add_cross_attention": True}, "gpt2 with cross-attention"),
    ("xglm", {"add_cross_attention": True}, "xglm with cross-attention"),
]


@pytest.mark.parametrize(("family", "changes", "said"), REFUSED)
def test_what_a_family_does_not_support_is_refused_by_name(family, changes, said, tmp_path):
    folder = make_checkpoint(tmp_path, family)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=said):
        make_model(folder)


#: Names that files of older versions of transformers have besides the weights, and names that they had for weights.
OLD_FILES = [
    ("gpt-neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias",
                  "gpt_neox.layers.2.attention.rotary_emb.inv_freq"], {}),
    ("gptj", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"], {}),
    ("codegen", ["transformer.h.0.attn.causal_mask"], {}),
    ("gpt-neo", ["transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"], {}),
    ("gpt2", ["h.0.attn.bias", "lm_head.weight"], {"transformer.": ""}),
    ("gpt1", ["position_ids", "h.1.attn.bias"], {"transformer.": ""}),
    ("xglm", ["model.embed_positions.weights"], {}),
    ("bloom", ["lm_head.weight"], {"transformer.": ""}),
    ("opt", ["lm_head.weight"], {"model.": ""}),
    ("cohere", ["layers.0.self_attn.rotary_emb.inv_freq"], {"model.": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "extra", "renamed"), OLD_FILES)
def test_files_of_older_versions(family, extra, renamed, tmp_path):
    folder = make_checkpoint(tmp_path, family)
    expected = run(make_model(folder), IDS, [40])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in renamed.items():
        tensors = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    save_file({**{name: torch.zeros(512, 64) for name in extra}, **tensors}, path)
    assert torch.equal(run(make_model(folder), IDS, [40]), expected)


@pytest.mark.parametrize("overlap_bytes", [0, 64])
def test_parallel_parts_are_summed_over_ranks_once(overlap_bytes):
    """A sum of 9 rows of 24 bytes, which a lone product would begin in three parts; two products must not."""
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(6, 8), "b.weight": torch.randn(6, 8)}
    hidden, inner = torch.randn(9, 6), torch.randn(9, 8)
    begun = []
    expected = hidden + inner @ tensors["a.weight"].T + inner @ tensors["b.weight"].T

    class Part(nn.Module):
        def __init__(self, linear, x):
            super().__init__()
            self.linear, self.x = linear, x

        def forward(self, *given):
            return self.linear(self.x)

    def work(group):
        group.overlap_bytes = overlap_bytes
        begin = group.begin_all_reduce
        group.begin_all_reduce = lambda tensor, rows: (begun.append(rows), begin(tensor, rows))
        build, mine = make_build(group), inner.chunk(group.size, -1)[group.rank].contiguous()
        made = (load(build.linear(name, 8, 6, shard="row", reduce=False), tensors) for name in "ab")
        layer = ParallelLayer(build, nn.Identity(), *(Part(linear, mine) for linear in made))
        return layer(hidden.clone(), torch.zeros(1, 9), None)

    for found in run_ranks(2, work):
        torch.testing.assert_close(found, expected)
    assert not begun


@pytest.mark.parametrize("family", ["granite-hybrid", "granite-moe", "minicpm3"])
def test_no_sum_of_a_part_that_is_scaled_begins_before_it_is(family, tmp_path):
    model = make_model(make_checkpoint(tmp_path, family))
    scaled = [module for module in model.modules() if isinstance(module, Scaled)]
    assert scaled
    assert not [name for part in scaled for name, one in part.named_modules() if getattr(one, "begins", False)]
