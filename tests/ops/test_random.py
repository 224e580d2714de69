"""The noise's integer part is pinned by golden values, so that another platform can check its own version."""

import math

import pytest
import torch

from frame.core.ops.random import (
    add_gumbel_noise,
    gumbel,
    gumbel_noise,
    seed_stream,
    stream_keys,
    token_hash,
)

MASK_64, MASK_32 = 2**64 - 1, 2**32 - 1


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def key_of(seed: int, position: int) -> int:
    return mix64((mix64((seed + 0x9E3779B97F4A7C15) & MASK_64) + 8 * position) & MASK_64)


def hash_of(key: int, token: int) -> int:
    x = (token + key) & MASK_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    x = ((x ^ (x >> 15)) + (key >> 32)) & MASK_32
    x = (x * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)


GOLDEN = [
    (0, 0, 5197578548964807871, [691272643, 2640032286, 3680754266, 2496150543]),
    (1, 5, 231162128236045210, [922391723, 2935891757, 1433547968, 1803171923]),
    (2**64 - 1, 2**31, 6839215912528049551, [456990002, 3610858823, 4242518197, 2900511247]),
]


@pytest.mark.parametrize(("seed", "position", "key", "hashes"), GOLDEN)
def test_golden_values(seed, position, key, hashes):
    keys = stream_keys(torch.tensor([seed_stream(seed)]), torch.tensor([position]))
    assert keys.item() & MASK_64 == key == key_of(seed, position)
    tokens = [0, 1, 2, 151935]
    found = token_hash(keys, torch.tensor(tokens, dtype=torch.int32))
    assert [value & MASK_32 for value in found.tolist()] == hashes == [hash_of(key, token) for token in tokens]


def test_negative_seeds_are_their_64_bits():
    assert seed_stream(-1) == seed_stream(2**64 - 1)
    assert -(2**63) <= seed_stream(2**63) < 2**63


def test_hash_equals_integer_arithmetic_on_many_inputs():
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator)
    tokens = torch.randint(0, 300_000, (40,), generator=generator, dtype=torch.int32)
    found = token_hash(keys[:, None], tokens)
    expected = [[hash_of(key & MASK_64, token) for token in tokens.tolist()] for key in keys.tolist()]
    assert [[value & MASK_32 for value in row] for row in found.tolist()] == expected


def test_noise_follows_its_formula_and_is_always_finite():
    bits = torch.tensor([0, 1, 2**31 - 1, -(2**31), -1, -2, 123456789, -987654321], dtype=torch.int32)
    noise = gumbel(bits)
    assert bool(noise.isfinite().all())
    assert noise.max() < 22.88
    assert noise.min() > -2.82
    for value, found in zip(bits.tolist(), noise.tolist(), strict=True):
        share = min(max(abs(value), 0.25) / 2**31, 1 - 2**-24)
        assert found == pytest.approx(-math.log(-math.log1p(-share)), rel=1e-5, abs=1e-5)


def test_noise_has_the_moments_of_a_gumbel():
    keys = stream_keys(torch.tensor([42]), torch.tensor([0]))
    noise = gumbel_noise(keys, torch.arange(400_000, dtype=torch.int32)).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_noise_of_a_token_does_not_depend_on_what_else_is_computed():
    keys = stream_keys(torch.arange(5), torch.full((5,), 9))
    whole = torch.zeros(5, 70_001)
    add_gumbel_noise(whole, keys)
    tokens = torch.randperm(70_001)[:333].to(torch.int32)
    assert torch.equal(gumbel_noise(keys[3], tokens), whole[3, tokens.long()])
    shard = torch.zeros(5, 70_001)[:, 35_000:]
    shard = shard + gumbel_noise(keys[:, None], torch.arange(35_000, 70_001, dtype=torch.int32))
    assert torch.equal(shard, whole[:, 35_000:])


def test_keys_differ_by_seed_and_position():
    seeds = torch.tensor([seed_stream(seed) for seed in (1, 1, 2)])
    assert len(set(stream_keys(seeds, torch.tensor([1, 2, 1])).tolist())) == 3
