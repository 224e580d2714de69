"""Every kernel in every variant that launch code asks for, compiled for chips that are not there.

The interpreter runs kernels and does not compile them. Here nothing runs: what is checked is that Triton compiles each
kernel, that it fits the chip's shared memory, that no hot one keeps values in memory for want of registers, and that
products are done by the matrix unit that is meant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.ahead import A100, H200, TOOLS, Build, Chip
from tests.kernels.launches import build, compiler, kernels_launched, launches, plain_launches

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not (TOOLS / "ptxas").is_file(), reason="this Triton has no compiler for CUDA"),
    pytest.mark.timeout(900),
]
KERNELS = Path(__file__).parents[2] / "kernels"
#: A few of those that every request needs, for every run of the tests.
USUAL = (
    "usual, 256 rows",
    "usual, deterministic",
    "many rows, 8192 x 6144",
    "many gated rows, 8192 x 14336",
    "many rows of 128 experts, 8192 tokens",
    "experts of mxfp4 by 32, 64 tokens",
    "experts of mxfp4 in blocks, 512 tokens, 2880 columns",
    "one gated row, 1024 x 1024",
    "some gated rows, 6144 x 1024",
    "rotary, offset",
    "rotary, three axes",
    "latents and 16 heads turned",
    "one normed row, 4096 inputs",
    "one gated row, one output",
    "latent, 16 heads, one row",
    "sparse latents, 16 heads, one row",
    "index, 64 heads",
    "Mamba-2, single tokens",
    "delta net, single tokens",
    "mxfp4, 16 rows",
    "products of rounded rows, 64 rows",
    "products of halves with nibbles by 128, 64 rows",
    "delta net, long prompts",
    "copied blocks of torch.bfloat16",
)
#: Matrix units that products of 16-bit numbers may use on Hopper: HGMMA is a warpgroup's, HMMA a warp's.
UNITS = {
    "prefill._prefill_attention_kernel": {"HGMMA"},
    "linear_invariant._linear": {"HGMMA"},  # the bits of a row rest on it
    "linear_hopper._product": {"HGMMA"},
    "linear_rows._some_rows": {"HMMA"},
    "experts_hopper._grouped": {"HGMMA"},
    "decode._decode_attention_kernel": {"HMMA", "HGMMA"},
    "decode_narrow._narrow_decode": {"HMMA"},
    "decode_few._few_decodes": {"HMMA"},
    "attention._paged_attention_kernel": {"HMMA", "HGMMA"},
    "latent_decode._latent_decode": {"HMMA", "HGMMA"},
    "latent_hopper._latent_hopper": {"HGMMA"},
    "latent_few._latent_few": {"HGMMA"},
    "latent_prefill._latent_prefill": {"HMMA", "HGMMA"},
    "latent_sparse._latent_sparse": {"HMMA", "HGMMA"},
    "latent_index._index_scores": {"HMMA", "HGMMA"},
    "cascade._prefix_attention_kernel": {"HMMA", "HGMMA"},
    "experts._grouped": {"HMMA", "HGMMA"},
    "coded_experts._coded": {"HMMA", "HGMMA"},
    "coded_few._few_rows": {"HMMA"},
    "coded_blocks._block_rows": {"HGMMA"},
    "scans._ssd_rows": {"HMMA", "HGMMA"},
    "delta._delta_rows": {"HMMA", "HGMMA"},
    "delta._pass_moved": {"HMMA", "HGMMA"},
    "delta_tables._chunk_tables": {"HMMA", "HGMMA"},
    "quantized._few_rows": {"HMMA", "HGMMA"},
    "coded_rows._some_rows": {"HGMMA", "QGMMA"},  # the latter of 8-bit floats
    "coded_fragments._fragments": {"HMMA"},
    "coded_warpgroups._warpgroups": {"HGMMA"},
    "coded_ring._ring": {"HMMA"},
    "rounded_hopper._rounded": {"QGMMA"},
    "nibbles_hopper._nibbled": {"QGMMA"},
    "nibble_rows._nibble_rows": {"HMMA", "HGMMA"},
    "adapters._down": {"HMMA"},
    "adapters._up": {"HMMA"},
    "few_adapters._down_few": {"HMMA"},
    "few_adapters._up_few": {"HMMA"},
    "joined_adapters._joined_up": {"HMMA", "HGMMA"},
    "expert_adapters._down": {"HMMA"},
    "expert_adapters._up": {"HMMA"},
}
#: Accesses to memory for want of registers that the kernels may have which a step's time rests on, by Triton 3.6.0 or
#: 3.7.1. Layers of 128 that a GPU has timed have at most 26; the most are of 8-bit caches with heads of 256, or with
#: window, soft cap and sinks, which no GPU has run yet.
SPILLS = {
    "prefill._prefill_attention_kernel": 0,
    "decode._decode_attention_kernel": 96,
    "decode_narrow._narrow_decode": 0,
    "decode_few._few_decodes": 3,  # of heads of 128 with sinks by four warps with 64 keys; others need none
    "attention._paged_attention_kernel": 111,  # deterministic, 8-bit caches: one warp fills its registers
    "cascade._prefix_attention_kernel": 8,
    "latent_decode._latent_decode": 40,  # of 64 heads, whose sums fill the registers of 8 warps
    "latent_decode._join_parts": 0,
    "latent_hopper._latent_hopper": 24,  # four of them in a loop, for addresses
    "latent_few._latent_few": 4,  # by Triton 3.7, none in a loop; 3.6 needs none
    "latent_prefill._latent_prefill": 0,
    "latent_sparse._latent_sparse": 40,  # as above
    "latent_index._index_scores": 0,
    "latent_index._choose_best": 0,
    "codebook._table_weights": 0,
    "linear._one_row": 4,
    "linear._one_row_gated": 0,
    "norm_linear._norm_linear": 0,
    "linear_invariant._linear": 0,
    "linear_hopper._product": 0,
    "linear_rows._some_rows": 0,
    "experts_hopper._grouped": 0,
    "experts._grouped": 0,
    "coded_experts._coded": 2,  # before the steps of the narrowest tile
    "coded_few._few_rows": 11,  # by Triton 3.7, with one token
    "coded_blocks._block_rows": 16,  # of blocks of 64, which all the same are the quickest on an H200
    "coded_blocks._ordered": 0,
    "coded_vectors._coded_vector_gate_up": 0,
    "coded_vectors._coded_vector_down": 2,  # by Triton 3.6; 3.7 needs none
    "experts._vector_gate_up": 0,
    "experts._vector_down": 0,
    "norm._rms_norm": 0,
    "rotary._rotary": 0,
    "latent_rotary._latent_rotary": 0,
    "block_copies._copy_pieces": 0,
    "convolution._conv_step": 0,
    "scans._ssd_step": 0,
    "delta._delta_step": 0,
    "quantized._few_rows": 0,
    "coded_rows._one_row": 0,
    "coded_rows._some_rows": 0,
    "coded_fragments._fragments": 0,
    "coded_warpgroups._warpgroups": 0,
    "coded_ring._ring": 0,
    "rounded_hopper._rounded": 0,
    "nibbles_hopper._nibbled": 4,  # of groups of 32 and 64 rows; others have none
    "halves._split_rows": 0,
    "nibble_rows._nibble_rows": 32,  # of Q5_K with more than 16 rows; 3 with fewer
    "quantized._rounded_product": 0,
    "adapters._down": 0,
    "adapters._up": 0,
    "few_adapters._down_few": 0,
    "few_adapters._up_few": 0,
    "joined_adapters._joined_up": 0,
    "expert_adapters._down": 0,
    "expert_adapters._up": 0,
}
#: Modules whose kernels read by bulk copies.
COPIED = (
    "prefill.", "linear_hopper.", "linear_rows.", "experts_hopper.", "coded_ring.", "latent_hopper.", "latent_few.",
    "rounded_hopper.", "nibbles_hopper._nibbled",
)  # fmt: skip
#: Instructions of the kernel that takes longest to compile, which a cold start waits for; they were over 6,000.
LONGEST, MOST_INSTRUCTIONS = "usual, persistent Hopper prompts", 4400
#: Experts whose sizes fit no tile are multiplied in any way.
UNFIT = "6 experts"


@pytest.fixture(scope="module")
def compiling() -> Iterator[ProcessPoolExecutor]:
    with compiler() as pool:
        yield pool


def faults(one: Build, chip: Chip, name: str) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = []
    if one.shared_bytes > chip.shared_bytes:
        found.append(f"{one.shared_bytes} bytes of shared memory")
    if one.dead:  # a build of Triton that checks itself fails on them: it knows no addresses there
        found.append(f"{one.dead} branches that are never taken")
    if one.strays:  # ptxas lost a value: it did so of pairs of e4m3 that are converted back
        found.append(f"{one.strays} instructions compute with the stack pointer")
    wide = "float32" in name
    if chip is H200 and not wide and UNFIT not in name and one.spills > SPILLS.get(one.name, one.spills):
        found.append(f"{one.spills} accesses to memory for want of registers")
    meant = set() if wide else UNITS.get(one.name, set())
    if meant and "rounded tokens" in name:  # of 8-bit floats
        meant = {"QGMMA"}
    if chip is not H200 and meant:
        meant = {"HMMA"}
    used = one.instructions & {"HMMA", "HGMMA", *meant}
    if not used <= meant or bool(used) != bool(meant):
        found.append(f"matrix units {sorted(used)} instead of {sorted(meant)}")
    if one.name.startswith(COPIED) and "UTMALDG" not in one.instructions:
        found.append("no bulk copy")
    return found


def check(chip: Chip, name: str, compiling: ProcessPoolExecutor) -> None:
    builds = compiling.submit(build, chip, name).result()
    assert builds
    wrong = {one.name: found for one in builds if (found := faults(one, chip, name))}
    assert not wrong, (wrong, builds)


def test_every_kernel_is_launched_here(compiling: ProcessPoolExecutor) -> None:
    launched = compiling.submit(kernels_launched, H200).result()
    shipped = set()
    for file in sorted(KERNELS.glob("*.py")):
        shipped |= {f"{file.stem}.{kernel}" for kernel in re.findall(r"^ +(_\w+)\[", file.read_text(), re.MULTILINE)}
    assert shipped == launched


@pytest.mark.some(8)
@pytest.mark.parametrize("name", USUAL)
def test_the_usual_ones_compile_for_hopper(name: str, compiling: ProcessPoolExecutor) -> None:
    check(H200, name, compiling)


def test_the_longest_compilation_of_a_start_stays_short(compiling: ProcessPoolExecutor) -> None:
    check(H200, LONGEST, compiling)
    [kernel] = [one for one in compiling.submit(build, H200, LONGEST).result() if one.name.startswith("prefill.")]
    assert kernel.size <= MOST_INSTRUCTIONS


@pytest.mark.slow
@pytest.mark.parametrize("name", launches())
def test_every_launch_compiles_for_hopper(name: str, compiling: ProcessPoolExecutor) -> None:
    check(H200, name, compiling)


@pytest.mark.slow
@pytest.mark.parametrize("name", plain_launches())
def test_plain_kernels_compile_for_ampere(name: str, compiling: ProcessPoolExecutor) -> None:
    check(A100, name, compiling)
