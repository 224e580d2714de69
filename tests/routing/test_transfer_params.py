"""Clients that say themselves from where a server is to fetch KV: what a front lets through. Over sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.routing.fakes import CHAT, front, reply, servers
from tests.routing.test_attacks import spoken
from tests.routing.test_pairs import COMPUTED, pairs

OWN = {"do_remote_prefill": True, "remote_host": "10.9.9.9", "remote_port": 22}
JSON = {"Content-Type": "application/json"}
SPLIT = 11
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n%b\r\n--x--\r\n',
    b"Content-Type: multipart/form-data; boundary=x\r\n",
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, json.dumps({"messages": [], "kv_transfer_params": OWN}).encode()),
        ("/v1/completions", b'{"prompt": "x", "kv_transfer_param\\u0073": {"do_remote_prefill": true}}'),
        ("/generate", json.dumps({"sampling_params": {"extra_args": {"kv_transfer_params": OWN}}}).encode()),
        ("/v1/new", json.dumps({"requests": [{"kv_transfer_params": OWN}]}).encode()),
    ],
    ids=["plain", "escaped", "nested", "listed"],
)
async def test_the_field_is_refused_before_a_server_sees_it(path: str, body: bytes) -> None:
    async with pairs([reply(200)], [COMPUTED]) as ((d,), (p,), f):
        answer = await f.client.post(path, content=body, headers=JSON)
        assert answer.status_code == 400
        assert "would have a server fetch KV from an address that a client names" in answer.text
        assert (d.seen, p.seen) == ([], [])


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [], "kv_transfer_params": {}}'.encode("utf-16"),
        b'{"top_p": NaN, "kv_transfer_params": {}}',
        b'{"messages": [],' + b'"x": [' + b"[]," * (1 << 17) + b'0], "kv_transfer_params": {}}',
    ],
    ids=["another encoding", "no number", "too many parts"],
)
async def test_what_others_might_read_and_the_front_cannot_is_refused(body: bytes) -> None:
    async with pairs([reply(200)], [COMPUTED]) as ((d,), _, f):
        answer = await f.client.post(CHAT, content=body, headers=JSON)
        assert (answer.status_code, d.seen) == (400, [])
        assert "the body is no JSON that a front which divides requests can read" in answer.text


@pytest.mark.parametrize(
    "line",
    [
        b'{"body": {"kv_transfer_params": {"remote_host": "10.9.9.9"}}}',
        b'{"body": {"kv_tr\\u0061nsfer_params": {"remote_host": "10.9.9.9"}}}',
    ],
)
async def test_files_of_requests_do_not_carry_it_either(line: bytes) -> None:
    """In pieces that divide the name, after which the server sees a file that breaks off."""
    async with pairs([reply(200)], [COMPUTED]) as (_, _, f):
        body, kind = FORM[0] % line, FORM[1]
        head = b"POST /v1/files HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + kind
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        place = body.index(b"kv_tr") + SPLIT
        answer = await spoken(f, head + body[:place], body[place:])
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert b"would have a server fetch KV" in answer


async def test_other_files_pass() -> None:
    async with pairs([reply(200)], [COMPUTED]) as ((d,), _, f):
        data = json.dumps({"text": "\u00e9\u4e2d\n\x07"}).encode() * 1000
        assert (await f.client.post("/v1/files", files={"file": ("a.jsonl", data)})).status_code == 200
        assert data in d.seen[0].body


@pytest.mark.parametrize(
    "body", [{"messages": [{"role": "user", "content": 'what is "kv_transfer_params"? \u00e9'}]}, {"x": None}, []]
)
async def test_texts_about_it_pass(body: Any) -> None:
    async with pairs([reply(200, {"from": "d"})], [COMPUTED]) as (_, _, f):
        assert (await f.client.post(CHAT, json=body)).json() == {"from": "d"}


async def test_the_option_lets_it_through() -> None:
    async with pairs([reply(200)], [COMPUTED], "--allow-kv-transfer-params") as ((d,), (p,), f):
        await f.client.post(CHAT, json={"messages": [], "kv_transfer_params": OWN})
        assert (d.seen[0].json["kv_transfer_params"], p.seen) == (OWN, [])


async def test_a_front_that_divides_nothing_passes_it() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        await f.client.post(CHAT, json={"messages": [], "kv_transfer_params": OWN})
        assert server.seen[0].json["kv_transfer_params"] == OWN


async def test_it_stays_refused_when_the_list_has_no_servers_for_prompts_any_more(tmp_path: Any) -> None:
    async with servers(reply(200), COMPUTED) as (d, p):
        listed = tmp_path / "servers.txt"
        listed.write_text(f"{d.url}\n{p.url} prefill\n")
        async with front("--servers", str(listed)) as f:
            listed.write_text(f"{d.url}\n")
            await f.watch.look()
            assert len(f.fleet.servers) == 1
            answer = await f.client.post(CHAT, json={"messages": [], "kv_transfer_params": OWN})
            assert (answer.status_code, d.seen) == (400, [])
