"""Other weights while the server runs: taken whole or not at all, by requests that run and by the engine after."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.server.running import REAL, Running, server, until
from tests.server.test_admin import FAULTY, LONG, in_thread, until_running

ASKED = {
    "prompt": "the sea is wide and the sky is high above it",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}
USER, ROOT = {"x-api-key": "user"}, {"x-api-key": "root"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("one", 1), ("two", 2)):
        make_checkpoint(folder / name, "llama", seed=seed, tokenizer=True)
    for name in ("other", "wide", "torn", "pickled", "bare"):
        shutil.copytree(folder / "two", folder / name)
    config = (folder / "other" / "config.json").read_text()
    (folder / "other" / "config.json").write_text(config.replace("LlamaForCausalLM", "Qwen2ForCausalLM"))
    config = (folder / "wide" / "config.json").read_text()
    (folder / "wide" / "config.json").write_text(re.sub(r'"rms_norm_eps": [^,]+', '"rms_norm_eps": 0.5', config))
    weights = (folder / "torn" / "model.safetensors").read_bytes()
    (folder / "torn" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "model.bin")
    (folder / "bare" / "model.safetensors").unlink()
    (folder.parent / "outside").mkdir(exist_ok=True)
    (folder / "link").symlink_to(folder.parent / "outside")
    return folder


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[Running]:
    settings = ("--admin-port", "0", "--admin-key", "root", "--api-key", "user", "--weights-root", str(root))
    with server(REAL, str(root / "one"), *settings, "--served-model-name", "m", "--enable-prompt-tokens-details",
                "--block-size", "16", "--disable-access-log", "--logits-processors", FAULTY) as running:  # fmt: skip
        until(lambda: "admin routes at" in running.text)
        yield running


@pytest.fixture(scope="module")
def admin(running: Running) -> Iterator[httpx.Client]:
    found = re.search(r"admin routes at (\S+)", running.text)
    assert found is not None
    with httpx.Client(base_url=found.group(1), headers=ROOT, timeout=60) as client:
        yield client


def complete(running: Running, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{running.url}/v1/completions", json={**ASKED, **fields}, headers=USER, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text(running: Running, **fields: Any) -> str:
    return str(complete(running, **fields)["choices"][0]["text"])


@pytest.fixture(scope="module")
def texts(running: Running, admin: httpx.Client, root: Path) -> dict[str, str]:
    """What each checkpoint says; the server serves "one" afterwards."""
    from frame import LLM, SamplingParams

    wanted = {}
    for name in ("one", "two"):
        llm = LLM(str(root / name), num_threads=1)
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        wanted[name] = llm.generate(str(ASKED["prompt"]), params, use_tqdm=False)[0].outputs[0].text
        llm.close()
    assert wanted["one"] != wanted["two"]
    return wanted


def update(admin: httpx.Client, **fields: Any) -> httpx.Response:
    return admin.post("/update_weights", json=fields)


@pytest.mark.matrix
def test_new_weights_serve_and_nothing_computed_before_is_used(
    running: Running, admin: httpx.Client, texts: dict[str, str], root: Path
) -> None:
    assert text(running) == texts["one"]
    assert complete(running)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for name in ("two", "one"):
        assert update(admin, model=name).json() == {"updated": True, "model": str(root / name), "revision": None}
        answer = complete(running)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["choices"][0]["text"] == texts[name]
    assert admin.post("/update_weights").status_code == 200
    assert text(running) == texts["one"]
    assert admin.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("model", "status", "reason"),
    [
        ("other", 409, "holds a Qwen2ForCausalLM, the engine serves a LlamaForCausalLM"),
        ("wide", 409, r"differs in rms_norm_eps \(0.5, served"),
        ("torn", 409, "model.safetensors"),
        ("pickled", 409, "which frame never opens"),
        ("bare", 409, "there is no .safetensors file"),
        ("nowhere", 409, "no folder"),
        ("link", 403, "must lie under --weights-root"),
        ("..", 403, "must lie under --weights-root"),
        ("/etc", 403, "must lie under --weights-root"),
        ("a\0b", 400, "model is not the path of a folder"),
        ("", 400, "model"),
    ],
)
def test_what_does_not_fit_leaves_the_old_weights_serving(
    running: Running, admin: httpx.Client, texts: dict[str, str], model: str, status: int, reason: str
) -> None:
    answer = update(admin, model=model)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert re.search(reason, message), message
    assert status != 409 or message.startswith("the old weights serve on: "), message
    assert text(running) == texts["one"]


def test_running_requests_finish_first_or_go_on_with_the_new_weights(
    running: Running, admin: httpx.Client, texts: dict[str, str]
) -> None:
    long = text(running, max_tokens=60)
    answers: list[httpx.Response] = []
    thread = in_thread(running, answers, **{**ASKED, "max_tokens": 60})
    assert update(admin, model="two").status_code == 200
    thread.join(60)
    assert answers[0].json()["choices"][0]["text"] in (long, text(running, max_tokens=60))
    thread = in_thread(running, answers, **{**ASKED, **LONG})
    until_running(running)
    assert update(admin, model="one", mode="keep").status_code == 200
    thread.join(60)
    assert answers[1].json()["choices"][0]["finish_reason"] == "length"
    assert text(running) == texts["one"]
    admin.post("/pause")
    assert update(admin, model="one").status_code == 200
    assert admin.get("/is_paused").json() == {"is_paused": True}
    admin.post("/resume")


def test_the_engine_after_this_one_serves_the_new_weights(
    running: Running, admin: httpx.Client, texts: dict[str, str]
) -> None:
    assert update(admin, model="two").status_code == 200
    before = running.children()["engine"]
    os.kill(before, signal.SIGKILL)
    until(lambda: running.children().get("engine", before) != before)
    assert text(running) == texts["two"]
    assert update(admin, model="one").status_code == 200
    assert text(running) == texts["one"]


def test_a_sleeping_engine_keeps_its_weights(running: Running, admin: httpx.Client, texts: dict[str, str]) -> None:
    assert admin.post("/sleep", json={"level": 2}).status_code == 200
    answer = update(admin, model="two")
    assert answer.status_code == 409
    assert "wake it up first" in answer.json()["error"]["message"]
    assert admin.post("/wake_up").status_code == 200
    assert text(running) == texts["one"]
