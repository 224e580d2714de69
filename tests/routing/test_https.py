"""Fronts and servers that speak https."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import httpx
import pytest

from tests.routing.fakes import CHAT, front, reply, servers
from tests.routing.running import route
from tests.server.key_pairs import curve_key, make_pair
from tests.server.running import until


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_server_with_a_certificate_is_reached_if_it_is_trusted(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_pair("authority", curve_key())
    ours = authority.write(tmp_path, "authority")
    own = make_pair("front", curve_key(), authority).write(tmp_path, "front")
    keys = ("--ssl-certfile", str(own), "--ssl-keyfile", str(own.with_suffix(".key")))
    async with servers(reply(200, {"from": "behind"})) as (server,), front(server.url, *keys) as f:
        secure = f.url.replace("http:", "https:")
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(ours))) as client:
            assert (await client.post(f"{secure}{CHAT}", json={})).json() == {"from": "behind"}
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(ours))
        with contextlib.ExitStack() as stack:
            second = await asyncio.to_thread(stack.enter_context, route(secure, "--health-seconds", "0.2"))

            def state() -> tuple[str, str | None]:
                (server,) = httpx.get(f"{second.url}/fleet").json()["servers"]
                return server["state"], server["problem"]

            if trusted:
                await asyncio.to_thread(until, lambda: state() == ("ready", None), 10)
                answer = await asyncio.to_thread(httpx.post, f"{second.url}{CHAT}", json={})
                assert answer.json() == {"from": "behind"}
            else:
                found, problem = await asyncio.to_thread(state)
                assert found == "unready"
                assert (problem or "").startswith("TLS failed: ")
                assert (await asyncio.to_thread(httpx.post, f"{second.url}{CHAT}", json={})).status_code == 503
            await asyncio.to_thread(second.stop)
