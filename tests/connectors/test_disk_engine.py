"""The disk connector under the whole engine: reloaded prompts give the same tokens, whatever happens to the files."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.connectors import disk_prompts
from tests.connectors.disk_prompts import CACHED, SIZES, complete

FAMILIES = ("llama", "gemma2")
NOTHING = [0] * len(SIZES)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), request.param))


def complete_elsewhere(folder, *models, repeats=1):
    """As `complete`, for one model after the other, in a process of its own."""
    command = [sys.executable, disk_prompts.__file__, str(folder), str(repeats), *models]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def damage(path, kind):
    data = bytearray(path.read_bytes())
    if kind == 0:
        data = data[: len(data) // 2]
    elif kind == 1:
        data[-7] ^= 0x40
    else:
        data = bytearray(b"garbage")
    path.write_bytes(bytes(data))


def test_a_new_process_reloads_what_another_computed(tmp_path):
    models, expected = [str(make_checkpoint(tmp_path / name, name)) for name in FAMILIES], []
    for model in models:
        tokens, cached = complete(model, str(tmp_path / "kv"))
        assert cached == NOTHING
        expected.append([tokens, CACHED])
    assert complete_elsewhere(tmp_path / "kv", *models) == expected


def test_damaged_files_change_no_token(model, tmp_path):
    expected, _ = complete(model, str(tmp_path))
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) == sum(size // disk_prompts.BLOCK_SIZE for size in SIZES)
    for index, path in enumerate(files):
        damage(path, index % 3)
    # each file is found, read, refused and removed; its request is computed instead, and its blocks written again
    assert complete(model, str(tmp_path))[0] == expected
    assert complete(model, str(tmp_path), 2) == [expected, CACHED]


@pytest.mark.matrix
def test_engines_share_a_folder_at_the_same_time(tmp_path):
    model = str(make_checkpoint(tmp_path / "model", "gemma2"))
    with ThreadPoolExecutor(2) as pool:
        [one], [two] = pool.map(lambda _: complete_elsewhere(tmp_path / "kv", model, repeats=3), range(2))
    assert one == two
    assert one[1] == CACHED


def test_other_weights_of_the_same_shape_get_nothing(tmp_path):
    models = [str(make_checkpoint(tmp_path / name, "llama", seed=seed)) for seed, name in enumerate("ab")]
    folder = str(tmp_path / "kv")
    expected, _ = complete(models[0], folder)
    assert complete(models[1], folder)[1] == NOTHING
    assert complete(models[0], folder) == [expected, CACHED]


def test_latents_and_the_keys_of_an_index_are_reloaded(tmp_path):
    """Layers of one group whose blocks are of two sizes."""
    model, folder = str(make_checkpoint(tmp_path / "model", "deepseek-v32")), str(tmp_path / "kv")
    expected, cached = complete(model, folder)
    assert cached == NOTHING
    assert complete(model, folder) == [expected, CACHED]


@pytest.mark.matrix
def test_two_ranks_reload_each_its_part(tmp_path):
    model, folder, ranks = str(make_checkpoint(tmp_path / "model", "gemma2")), tmp_path / "kv", 2
    expected, cached = complete(model, str(folder), tensor_parallel_size=ranks)
    assert cached == NOTHING
    files = sorted(folder.rglob("*.kv"))
    assert len(files) == ranks * sum(size // disk_prompts.BLOCK_SIZE for size in SIZES)
    assert complete(model, str(folder), tensor_parallel_size=ranks) == [expected, CACHED]
    # one rank's part of a block in the middle is damaged: the other's is of no use then
    for path in files[:: len(files) // 4]:
        damage(path, 1)
    assert complete(model, str(folder), tensor_parallel_size=ranks)[0] == expected
    assert complete(model, str(folder), tensor_parallel_size=ranks) == [expected, CACHED]
