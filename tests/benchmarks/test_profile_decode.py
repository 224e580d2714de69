"""Which product a kernel is of, and the command on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PRODUCT, NORM, ATTENTION = "nvjet_tst_128x64", "_rms_norm", "_decode_attention_kernel"
LAYER = [NORM, PRODUCT, "_rotary", "_longest_first", ATTENTION, PRODUCT, NORM, PRODUCT, "_gated", PRODUCT]


@pytest.fixture
def profile_decode(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("profile_decode")


def test_products_are_labelled_by_the_attention_before_them(profile_decode):
    names = ["_build_inputs", *LAYER, *LAYER, NORM, PRODUCT, "_best_of_part"]
    labels = profile_decode.labelled(names * 2, layers=2)
    products = [label for name, label in zip(names * 2, labels, strict=True) if name == PRODUCT]
    layer = ["query, key, value", "attention output", "gate and up", "down"]
    assert products == [*layer, *layer, "head"] * 2
    assert labels.count("attention") == 8  # the order of rows counts as attention
    assert labels.count("sampling") == 2


def test_a_sum_of_partial_products_belongs_to_the_product_before_it(profile_decode):
    names = [PRODUCT, ATTENTION, PRODUCT, "splitKreduce_kernel", NORM, PRODUCT]
    assert profile_decode.labelled(names, 4)[3] == "attention output"


@pytest.mark.matrix
def test_a_run_is_divided_without_a_gpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "profile_decode.py"), "--shape", "demo", "--batches", "2"]
    sizes = ["--mixed", "2+20", "--context", "20", "--settle", "2", "--steps", "3", "--json", str(tmp_path / "x.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    run, decodes, mixed = json.loads((tmp_path / "x.json").read_text())["results"]
    assert sum(kind["steps"] * kind["seconds"] for kind in run["kinds"]) <= run["seconds"]
    assert decodes["tokens"] == 2
    assert mixed["tokens"] > 20
