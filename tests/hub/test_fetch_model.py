"""Models by name, from a hub on loopback: what is fetched, and one sentence for each way in which it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.core.config.checkpoint import DEMO_FOLDER
from tests.hub.fake_hub import MAIN, NAME, OLD, TOKEN, FakeHub, running_hub
from tests.server.running import REAL, server, until

WANTED = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
OTHERS = {
    "pytorch_model.bin": b"a pickle", "modeling_tiny.py": b"raise SystemExit", "README.md": b"#", "evil.pkl": b"x",
    "original/model.safetensors": b"double", "consolidated.safetensors": b"double",
}  # fmt: skip
FETCH = """
import sys
from frame.settings import ConfigError, fetch_model, find_folder, from_flat
try:
    config = fetch_model(from_flat(dict(arg.split("=") for arg in sys.argv[1:])))
    print(config.model.revision, find_folder(config.model.model, config.model.revision))
except ConfigError as error:
    print("refused:", error)
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    names = [name for name in WANTED if (DEMO_FOLDER / name).exists()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    return {**{name: (DEMO_FOLDER / name).read_bytes() for name in names}, **OTHERS}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    with running_hub(dict(files)) as hub:
        yield hub


def environment(hub: FakeHub | None, cache: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    url = hub.url if hub is not None else "http://127.0.0.1:9"  # nobody listens there
    return {**kept, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def fetch(hub: FakeHub | None, cache: Path, variables: dict[str, str] | None = None, **settings: Any) -> str:
    arguments = [f"{name}={value}" for name, value in {"model": NAME, **settings}.items()]
    done = subprocess.run(
        [sys.executable, "-c", FETCH, *arguments],
        env=environment(hub, cache, **(variables or {})), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def folder_of(cache: Path, commit: str = MAIN) -> Path:
    return cache / "hub" / "models--org--tiny" / "snapshots" / commit


def test_what_a_model_needs_is_fetched_once_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path) == f"{MAIN} {folder_of(tmp_path)}"
    found = sorted(str(path.relative_to(folder_of(tmp_path))) for path in folder_of(tmp_path).rglob("*"))
    assert found == sorted(set(WANTED) & set(hub.files))
    for name in found:
        assert (folder_of(tmp_path) / name).read_bytes() == hub.files[name]
    assert sorted(hub.sent()) == found
    hub.asked.clear()
    assert fetch(hub, tmp_path) == f"{MAIN} {folder_of(tmp_path)}"
    assert hub.sent() == []


def test_a_broken_transfer_goes_on_where_it_stopped(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = bytes(22 << 20)  # the library writes pieces of 10 MiB
    hub.broken = {"model.safetensors": 15 << 20}
    assert fetch(hub, tmp_path).startswith(MAIN)
    ranges = [asked for method, path, asked in hub.asked if method == "GET" and path.endswith("/model.safetensors")]
    assert ranges == [None, f"bytes={10 << 20}-"]
    assert (folder_of(tmp_path) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_what_a_killed_process_has_fetched_is_kept_and_checked(hub: FakeHub, tmp_path: Path) -> None:
    hub.wrong, hub.stalled = {"config.json"}, {"model.safetensors": 1000}
    process = subprocess.Popen([sys.executable, "-c", FETCH, f"model={NAME}"], env=environment(hub, tmp_path))
    others = set(WANTED) & set(hub.files) - {"model.safetensors"}
    until(lambda: all((folder_of(tmp_path) / name).exists() for name in others) and "model.safetensors" in hub.sent())
    process.kill()
    process.wait()
    hub.stalled.clear()
    (left,) = tmp_path.rglob("*.incomplete")
    os.utime(left, (1, 1))
    hub.asked.clear()
    assert fetch(hub, tmp_path).startswith("refused: config.json of model")
    assert hub.sent() == ["model.safetensors"]
    hub.wrong.clear()
    assert fetch(hub, tmp_path).startswith(MAIN)
    assert hub.sent() == ["model.safetensors", "config.json"]
    assert not [*tmp_path.rglob("frame-unchecked"), *tmp_path.rglob("*.incomplete")]


def test_an_interrupt_ends_a_command_that_fetches_at_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.stalled["model.safetensors"] = 1000
    process = subprocess.Popen([*REAL, NAME, "--port", "0"], env=environment(hub, tmp_path), stderr=subprocess.PIPE)
    until(lambda: "model.safetensors" in hub.sent())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=8)  # the library would wait for longer
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_another_hash_is_removed_and_named(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.wrong = {name}
    text = fetch(hub, tmp_path)
    assert text.startswith(f"refused: {name} of model '{NAME}' does not have the hash that the hub states")
    assert not (folder_of(tmp_path) / name).exists()
    hub.wrong.clear()
    assert fetch(hub, tmp_path).startswith(MAIN)


def test_revisions_caches_and_weights_that_nobody_wants(hub: FakeHub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path, revision="old") == f"{OLD} {folder_of(tmp_path, OLD)}"
    missing = fetch(hub, tmp_path, revision="newest")
    assert missing == f"refused: model '{NAME}' has no revision 'newest' at {hub.url}"
    other = tmp_path / "other"
    text = fetch(hub, tmp_path, download_dir=other, load_format="dummy")
    assert text == f"{MAIN} {other / 'models--org--tiny' / 'snapshots' / MAIN}"
    assert not list(other.rglob("*.safetensors"))


def test_who_may_not_read_is_told_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    hub.private = True
    text = fetch(hub, tmp_path)
    assert f"{hub.url} has none of that name that can be read with this token or without one (HF_TOKEN)" in text
    text = fetch(hub, tmp_path, {"HF_TOKEN": "wrong"})
    assert text == f"refused: model '{NAME}' cannot be fetched: {hub.url} wants a valid token in HF_TOKEN"
    assert fetch(hub, tmp_path, {"HF_TOKEN": TOKEN}).startswith(MAIN)
    hub.private, hub.gated = False, True
    gated = fetch(hub, tmp_path / "fresh", {"HF_TOKEN": TOKEN})
    assert gated.startswith(f"refused: model '{NAME}' is gated: accept its terms at {hub.url}/{NAME}")


def test_a_model_that_is_nowhere_and_one_without_safetensors(hub: FakeHub, tmp_path: Path) -> None:
    assert "is not a local folder, and http" in fetch(hub, tmp_path, model="org/typo")
    assert not list(tmp_path.rglob("models--org--typo"))
    del hub.files["model.safetensors"]
    text = fetch(hub, tmp_path)
    assert "pickles (.bin, .pt) are not fetched: convert it to safetensors, or name the type of a GGUF file" in text
    assert "pytorch_model.bin" not in hub.sent()


@pytest.mark.matrix
def test_without_a_network_the_cache_serves(hub: FakeHub, tmp_path: Path) -> None:
    for setting in ({}, {"offline": "true"}):
        assert fetch(None, tmp_path, **setting).startswith(f"refused: model '{NAME}' is not a local folder, is not in")
    assert fetch(hub, tmp_path).startswith(MAIN)
    hub.asked.clear()
    for variables, setting in (({}, {}), ({"HF_HUB_OFFLINE": "1"}, {}), ({}, {"offline": "true"})):
        assert fetch(None, tmp_path, variables, **setting) == f"{MAIN} {folder_of(tmp_path)}"
    assert fetch(hub, tmp_path, offline="true").startswith(MAIN)
    assert hub.asked == []
    assert "revision 'old' of it is not in" in fetch(None, tmp_path, offline="true", revision="old")
    (folder_of(tmp_path) / "model.safetensors").unlink()
    assert "is not complete in" in fetch(None, tmp_path, offline="true")


def test_a_cache_that_cannot_be_written_is_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    told = fetch(hub, tmp_path, download_dir=str(tmp_path / "cache"))
    assert told.startswith(f"refused: model '{NAME}' cannot be stored in {tmp_path / 'cache'}: ")
    assert told.endswith("; name another folder with --download-dir")


@pytest.mark.matrix
def test_folders_the_demo_model_and_paths_are_never_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    for model in ("demo", "", str(DEMO_FOLDER)):
        assert fetch(hub, tmp_path, model=model) == f"None {DEMO_FOLDER}"
    for model in ("./nothing", "/no/such", "a/b/c"):
        assert fetch(hub, tmp_path, model=model).startswith(f"refused: no folder '{model}'")
    for model in ("/no/such.gguf", "such.gguf", "no/such.gguf"):
        assert fetch(hub, tmp_path, model=model).startswith(f"refused: no file '{model}'")
    assert hub.asked == []


def test_a_server_starts_from_a_name(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its processes only the first one asks the hub."""
    for name, value in environment(hub, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with server(REAL, NAME, "--max-model-len", "64") as running:
        assert httpx.get(f"{running.url}/v1/models", timeout=60).json()["data"][0]["id"] == NAME
        body = {"model": NAME, "prompt": "Once", "max_tokens": 3}
        assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert [path for _, path, _ in hub.asked if path.startswith("/api/")] == [
        f"/api/models/{NAME}/revision/main",
        f"/api/models/{NAME}/tree/{MAIN}",
    ]
    assert sorted(hub.sent()) == sorted(set(WANTED) & set(hub.files))


def test_an_llm_asks_before_torch_is_there(hub: FakeHub, tmp_path: Path) -> None:
    code = """
import sys
from frame import LLM
from frame.settings import ConfigError
try:
    LLM("org/typo")
except ConfigError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(hub, tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("model 'org/typo' is not a local folder"), done.stderr
    assert done.stdout.endswith("False\n")
