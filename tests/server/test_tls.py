"""A server with a certificate: https alone, renewed certificates, clients that must show one of their own."""

from __future__ import annotations

import contextlib
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from pydantic import ValidationError

from frame.core.config.errors import ConfigError
from frame.core.config.server import ServerConfig
from frame.core.server.certificates import tls_context
from tests.server.running import FAKE, Running, server, until

PAIRS = Path(__file__).with_name("tls")


def install(name: str, folder: Path) -> None:
    for ending in ("key", "crt"):
        shutil.copy(PAIRS / f"{name}.{ending}", folder / f"new.{ending}")
        (folder / f"new.{ending}").replace(folder / f"server.{ending}")


def trusting(name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(PAIRS / f"{name}.crt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    install("first", folder)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    files = ("--ssl-certfile", str(folder / "server.crt"), "--ssl-keyfile", str(folder / "server.key"))
    with server(FAKE, *files, "--enable-ssl-refresh", "--plugin.fake.vocab_size", "2048") as running:
        assert running.url.startswith("https://")
        yield running


def answers(running: Running, name: str) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return httpx.get(f"{running.url}/health", verify=trusting(name)).status_code == 200
    return False


def test_a_client_streams_over_tls_and_not_without(running: Running) -> None:
    with (
        httpx.Client(verify=trusting("first")) as http,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        whole = client.completions.create(model="demo", prompt="the sea is wide", max_tokens=30)
        stream = client.completions.create(model="demo", prompt="the sea is wide", max_tokens=30, stream=True)
        text = "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert text
    assert not answers(running, "second")
    with pytest.raises(httpx.TransportError):
        httpx.get(running.url.replace("https", "http") + "/health")


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(running: Running, folder: Path) -> None:
    with httpx.Client(verify=trusting("first")) as old:
        assert old.get(f"{running.url}/health").status_code == 200
        install("second", folder)
        until(lambda: answers(running, "second"))
        assert not answers(running, "first")
        assert old.get(f"{running.url}/health").status_code == 200  # its connection goes on
    (folder / "server.crt").write_text("nothing")
    until(lambda: "the renewed certificate is not taken" in running.text)
    assert answers(running, "second")


def test_wrong_files_are_refused_at_the_start(tmp_path: Path) -> None:
    first, second = PAIRS / "first.crt", PAIRS / "second.key"
    for certificate, key in ((tmp_path / "none.crt", None), (first, second), (second, None)):
        config = ServerConfig(ssl_certfile=str(certificate), ssl_keyfile=None if key is None else str(key))
        with pytest.raises(ConfigError, match="TLS cannot be had from"):
            tls_context(config)


def test_clients_can_be_asked_for_a_certificate() -> None:
    first, key = str(PAIRS / "first.crt"), str(PAIRS / "first.key")
    for reqs, mode in ((0, ssl.CERT_NONE), (1, ssl.CERT_OPTIONAL), (2, ssl.CERT_REQUIRED)):
        context = tls_context(ServerConfig(ssl_certfile=first, ssl_keyfile=key, ssl_ca_certs=first, ssl_cert_reqs=reqs))
        assert context is not None
        assert context.verify_mode == mode
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize(
    "settings",
    [{"ssl_keyfile": "k"}, {"enable_ssl_refresh": True}, {"ssl_certfile": "c", "ssl_cert_reqs": 2}],
    ids=str,
)
def test_settings_that_lack_another_say_so(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="needs ssl_c"):
        ServerConfig.model_validate(settings)
