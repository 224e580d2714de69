"""Adapters of a server: listed, chosen as models, loaded and unloaded while it runs, and found by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from frame.settings import stray_link
from frame.testing.checkpoints import make_checkpoint
from tests.server.running import REAL, Running, server, until

from .cases import make_adapter, merged_tokens

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

COUNT = 8
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    make_checkpoint(root / "base", "llama", tokenizer=True)
    for seed, name in enumerate(("one", "two", "three")):
        make_adapter(root / "base", root / "adapters" / name, seed=seed)
    make_adapter(root / "base", root / "adapters" / "wide", seed=9, r=32)
    make_adapter(root / "base", root / "outside", seed=10)
    (root / "adapters" / "link").symlink_to(root / "outside")
    (root / "adapters" / "empty").mkdir()
    for place, target in (("strays", root / "outside"), ("stays", root / "adapters" / "one")):
        (root / "adapters" / place).mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (root / "adapters" / place / name).symlink_to(target / name)
    return root


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, list[int]]:
    every = {"m": None, **{name: root / "adapters" / name for name in ("one", "two", "three")}}
    return {name: merged_tokens(root / "base", folder, [PROMPT], COUNT)[0] for name, folder in every.items()}


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[Running]:
    folder = str(root / "adapters")
    settings = (
        "--served-model-name", "m", "--dtype", "float32", "--enable-lora", "--max-loras", "2",
        "--lora-modules", f"first={folder}/one", f'{{"name": "second", "path": "{folder}/two"}}',
        "--admin-port", "0", "--admin-key", "root", "--lora-root", folder, "--lora-resolver", "folder",
        "--plugin.folder.root", folder, "--max-model-len", "128", "--num-gpu-blocks-override", "100",
        "--return-tokens-as-token-ids",
    )  # fmt: skip
    with server(REAL, str(root / "base"), *settings) as running:
        until(lambda: "admin routes at" in running.text)
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def admin(running: Running) -> Iterator[httpx.Client]:
    found = re.search(r"admin routes at (\S+)", running.text)
    assert found is not None
    with httpx.Client(base_url=found[1], headers={"x-api-key": "root"}, timeout=60) as client:
        yield client


def tokens(client: openai.OpenAI, model: str) -> list[int]:
    made = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=COUNT, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
    )
    logprobs = made.choices[0].logprobs
    assert made.model == model
    assert logprobs is not None
    return [int(token.removeprefix("token_id:")) for token in logprobs.tokens or []]


def test_the_client_lists_and_chooses_adapters(client: openai.OpenAI, wanted: dict[str, list[int]], root: Path) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert list(cards)[:3] == ["m", "first", "second"]
    assert cards["first"]["parent"] == "m"
    assert cards["first"]["root"] == str(root / "adapters" / "one")
    assert cards["m"]["parent"] is None
    assert client.models.retrieve("second").id == "second"
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda name: tokens(client, name), ["m", "first", "second"] * 2))
    assert found == [wanted["m"], wanted["one"], wanted["two"]] * 2


def test_chats_and_messages_choose_adapters(client: openai.OpenAI, running: Running) -> None:
    texts = set()
    for model in ("m", "first"):
        chat = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
        answers = [
            httpx.post(f"{running.url}{path}", json=chat, timeout=60)
            for path in ("/v1/chat/completions", "/v1/messages")
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [answer.json()["model"] for answer in answers] == [model, model]
        texts.add(answers[0].json()["choices"][0]["message"]["content"])
    assert len(texts) == 2


def test_adapters_come_and_go(
    client: openai.OpenAI, admin: httpx.Client, running: Running, wanted: dict[str, list[int]]
) -> None:
    body = {"lora_name": "mine", "lora_path": "three"}
    answer = admin.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert tokens(client, "mine") == wanted["three"]
    assert admin.post("/v1/load_lora_adapter", json=body).status_code == 400
    body = {"lora_name": "mine", "lora_path": "two", "load_inplace": True}
    assert admin.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert tokens(client, "mine") == wanted["two"]
    assert "mine" in [card["lora_name"] for card in admin.get("/adapters").json()["data"]]
    assert 'adapter="mine"' in httpx.get(f"{running.url}/metrics").text
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert "mine" not in [card.id for card in client.models.list()]
    with pytest.raises(openai.NotFoundError, match="no model 'mine'"):
        tokens(client, "mine")
    assert admin.delete("/adapters/mine").status_code == 404
    assert httpx.post(f"{running.url}/v1/load_lora_adapter", json=body).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "nowhere"}, 404, "there is no folder 'nowhere'"),
        ({"lora_name": "x", "lora_path": "../outside"}, 403, "must lie under --lora-root"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "must lie under --lora-root"),
        ({"lora_name": "x", "lora_path": "strays"}, 403, "in 'strays' is a link that leads out of --lora-root"),
        ({"lora_name": "x", "lora_path": "empty"}, 400, "has no adapter_config.json"),
        ({"lora_name": "x", "lora_path": "wide"}, 400, "has rank 32, and the most is 16 (max_lora_rank)"),
        ({"lora_name": "m", "lora_path": "one"}, 400, "is the name of the model itself"),
        ({"lora_name": "first", "lora_path": "two"}, 400, "is loaded already"),
    ],
)
def test_wrong_adapters_are_refused(admin: httpx.Client, body: dict[str, str], status: int, message: str) -> None:
    answer = admin.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


def test_a_resolver_finds_adapters_by_their_names(client: openai.OpenAI, wanted: dict[str, list[int]]) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: tokens(client, name), ["three"] * 4))
    assert found == [wanted["three"]] * 4
    with pytest.raises(openai.BadRequestError, match="has rank 32"):
        tokens(client, "wide")
    for unknown in ("link", "../outside", "nobody", "strays"):
        with pytest.raises(openai.NotFoundError, match="no model"):
            tokens(client, unknown)
    assert tokens(client, "stays") == wanted["one"]


def test_links_are_followed_to_their_ends(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "a" / "deep", root / "b", other):
        folder.mkdir(parents=True)
    (root / "a" / "around").symlink_to(root / "a")
    (root / "a" / "b").symlink_to("../b")
    assert stray_link(root / "a", root) is None
    (root / "b" / "file").symlink_to("../../other/absent")
    found = stray_link(root / "a", root)
    assert found == root / "b" / "file"
