"""A server with a certificate: https alone, renewed certificates, clients that must show one of their own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from cryptography.hazmat.primitives import serialization
from pydantic import ValidationError

from frame.core.cli.main import main
from frame.core.config.errors import ConfigError
from frame.core.config.server import ServerConfig
from frame.core.server import certificates
from frame.core.server.certificates import Certificates, tls_context
from tests.server.key_pairs import Pair, curve_key, make_pair, replace, rsa_key
from tests.server.running import FAKE, Running, server, until

NOT_TAKEN = "the renewed certificate cannot be used"
IN_USE = "a renewed certificate is in use"
HELLO = b"hello"


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    """Two servers' with keys of two types, and two authorities of clients with a client of each."""
    pairs = {"first": make_pair("first", curve_key()), "second": make_pair("second", rsa_key())}
    for name in ("own", "foreign"):
        pairs[f"{name} authority"] = make_pair(f"{name} authority", curve_key())
        pairs[name] = make_pair(name, curve_key(), pairs[f"{name} authority"])
    return pairs


@pytest.fixture(scope="module")
def kept(pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, pair in pairs.items():
        pair.write(folder, name)
    return folder


class Folder:
    """The files of a server, and what its clients know."""

    def __init__(self, path: Path, kept: Path, pairs: dict[str, Pair]) -> None:
        self.path, self._kept, self._pairs = path, kept, pairs
        self.install("first")
        self.trust("own")

    def install(self, name: str) -> None:
        self._pairs[name].write(self.path, "server")

    def trust(self, client: str) -> None:
        replace(self.path / "clients.crt", (self._kept / f"{client} authority.crt").read_bytes())

    def config(self, reqs: int = 2) -> ServerConfig:
        certificate, key = str(self.path / "server.crt"), str(self.path / "server.key")
        authorities = str(self.path / "clients.crt") if reqs else None
        return ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=authorities, ssl_cert_reqs=reqs)

    def certificates(self, reqs: int = 2) -> Certificates:
        made = tls_context(self.config(reqs))
        assert made is not None
        return made

    def client(self, *trusted: str, shows: str | None = "own") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self._kept / f"{trusted[0]}.crt"))
        for name in trusted[1:]:
            context.load_verify_locations(str(self._kept / f"{name}.crt"))
        if shows is not None:
            context.load_cert_chain(str(self._kept / f"{shows}.crt"), str(self._kept / f"{shows}.key"))
        return context


@pytest.fixture
def folder(tmp_path: Path, kept: Path, pairs: dict[str, Pair]) -> Folder:
    return Folder(tmp_path, kept, pairs)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, kept: Path, pairs: dict[str, Pair]) -> Folder:
    return Folder(tmp_path_factory.mktemp("served"), kept, pairs)


@pytest.fixture(scope="module")
def running(served: Folder) -> Iterator[Running]:
    files = {"--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key", "--ssl-ca-certs": "clients.crt"}
    flags = [part for flag, name in files.items() for part in (flag, str(served.path / name))]
    more = ("--ssl-cert-reqs", "2", "--enable-ssl-refresh", "--plugin.fake.vocab_size", "2048")
    with server(FAKE, *flags, *more) as running:
        assert running.url.startswith("https://")
        yield running


def answers(running: Running, client: ssl.SSLContext) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{running.url}/health", verify=client, timeout=60).status_code == 200
    return False


def refuses(running: Running, client: ssl.SSLContext) -> bool:
    """Whether the connection is refused, which is not the same as no answer in time."""
    try:
        httpx.get(f"{running.url}/health", verify=client, timeout=60)
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return True
    return False


def last_word(running: Running) -> str:
    """What the server said last about its files."""
    return next((line for line in reversed(running.lines) if NOT_TAKEN in line or IN_USE in line), "")


def test_a_client_streams_over_tls_and_not_without(running: Running, served: Folder) -> None:
    with (
        httpx.Client(verify=served.client("first")) as http,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        whole = client.completions.create(model="demo", prompt="the sea is wide", max_tokens=30)
        stream = client.completions.create(model="demo", prompt="the sea is wide", max_tokens=30, stream=True)
        text = "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert text
    assert refuses(running, served.client("second"))
    with pytest.raises((httpx.NetworkError, httpx.RemoteProtocolError)):
        httpx.get(running.url.replace("https", "http") + "/health", timeout=60)


@pytest.mark.parametrize("shows", [None, "foreign"])
def test_clients_without_a_right_certificate_are_refused(running: Running, served: Folder, shows: str | None) -> None:
    with httpx.Client(verify=served.client("first"), timeout=60) as other:
        assert other.get(f"{running.url}/health").status_code == 200
        assert refuses(running, served.client("first", shows=shows))
        assert other.get(f"{running.url}/health").status_code == 200
    assert answers(running, served.client("first"))
    assert "Traceback" not in running.text


def test_what_is_renewed_is_taken_and_what_is_broken_is_not(running: Running, served: Folder) -> None:
    """From one type of key to another, and from one authority of clients to another."""
    with httpx.Client(verify=served.client("first"), timeout=60) as old:
        assert old.get(f"{running.url}/health").status_code == 200
        served.install("second")
        until(lambda: answers(running, served.client("second")))
        assert refuses(running, served.client("first"))
        served.trust("foreign")
        until(lambda: answers(running, served.client("second", shows="foreign")))
        assert refuses(running, served.client("second", shows="own"))
        assert old.get(f"{running.url}/health").status_code == 200  # its connection goes on
    until(lambda: IN_USE in last_word(running))  # a new key beside the old certificate may have been refused before it
    replace(served.path / "server.crt", b"nothing")
    until(lambda: NOT_TAKEN in last_word(running))
    assert answers(running, served.client("second", shows="foreign"))


def shake_hands(
    accepting: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> ssl.SSLObject:
    """The client's side of a connection on which each side has heard the other; raises what either side does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = accepting.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session)
    for step in (theirs.do_handshake, ours.do_handshake) * 3:
        with contextlib.suppress(ssl.SSLWantReadError):
            step()
    ours.write(HELLO)
    theirs.write(HELLO)
    assert theirs.read() == ours.read() == HELLO
    return theirs


@pytest.mark.parametrize(
    ("reqs", "admitted"), [(0, (None, "own", "foreign")), (1, (None, "own")), (2, ("own",))], ids=str
)
def test_clients_are_asked_for_a_certificate_as_set(
    folder: Folder, reqs: int, admitted: tuple[str | None, ...]
) -> None:
    for shows in (None, "own", "foreign"):
        expected = contextlib.nullcontext() if shows in admitted else pytest.raises(ssl.SSLError, match=r"(?i)certif")
        with expected:
            shake_hands(folder.certificates(reqs), folder.client("first", shows=shows))
    assert tls_context(ServerConfig()) is None


def test_of_a_renewed_key_no_other_type_is_left(folder: Folder, pairs: dict[str, Pair]) -> None:
    serving, client = folder.certificates(0), folder.client("first", "second")
    old = folder.client("first", "second")  # knows nothing but the type of the first
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.set_ciphers("ECDHE+ECDSA")
    for name, other in (("first", "second"), ("second", "first"), ("first", "second")):
        folder.install(name)
        serving.look()
        assert shake_hands(serving, client).getpeercert(binary_form=True) == pairs[name].encoded != pairs[other].encoded
        with contextlib.nullcontext() if name == "first" else pytest.raises(ssl.SSLError):
            shake_hands(serving, old)


async def test_renewed_files_reach_connections_of_the_standard_event_loop(
    folder: Folder, pairs: dict[str, Pair]
) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        writer.close()

    serving, client = folder.certificates(), folder.client("first", "second")
    async with asyncio.timeout(60), await asyncio.start_server(greet, "127.0.0.1", 0, ssl=serving) as listening:
        port = listening.sockets[0].getsockname()[1]
        for name in ("first", "second"):
            folder.install(name)
            serving.look()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            assert await reader.read() == HELLO
            assert writer.get_extra_info("ssl_object").getpeercert(binary_form=True) == pairs[name].encoded
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_authority_that_is_removed_is_trusted_no_longer(folder: Folder, version: ssl.TLSVersion) -> None:
    serving, own, foreign = folder.certificates(), folder.client("first"), folder.client("first", shows="foreign")
    own.minimum_version = own.maximum_version = version
    session = shake_hands(serving, own).session
    assert shake_hands(serving, own, session).session_reused
    folder.trust("foreign")
    serving.look()
    shake_hands(serving, foreign)
    for kept in (None, session):
        with pytest.raises(ssl.SSLError, match=r"(?i)certif"):
            shake_hands(serving, own, kept)


def test_half_a_renewal_changes_nothing(
    folder: Folder, kept: Path, pairs: dict[str, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    serving, client = folder.certificates(0), folder.client("first", "second")
    for ending, said, shown in (("crt", NOT_TAKEN, "first"), ("key", IN_USE, "second")):
        replace(folder.path / f"server.{ending}", (kept / f"second.{ending}").read_bytes())
        caplog.clear()
        with caplog.at_level("INFO"):
            serving.look()
            serving.look()  # says it once
        assert [said in line for line in caplog.messages] == [True]
        assert shake_hands(serving, client).getpeercert(binary_form=True) == pairs[shown].encoded


def test_files_that_change_while_they_are_read_are_read_again(
    folder: Folder, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = certificates._context

    def read_before(config: ServerConfig) -> ssl.SSLContext:
        context = read(config)
        folder.install("second")
        return context

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_context", read_before)
        serving = folder.certificates(0)
    client = folder.client("first", "second")
    for shown in ("first", "second"):
        assert shake_hands(serving, client).getpeercert(binary_form=True) == pairs[shown].encoded
        serving.look()


WRONG_FILES = {
    "missing": ("none.crt", None, "--ssl-certfile .*none.crt cannot be read: No such file"),
    "missing key": ("first.crt", "none.key", "--ssl-keyfile .*none.key cannot be read: No such file"),
    "no key": ("first.crt", None, "--ssl-certfile .*first.crt holds no private key.*--ssl-keyfile"),
    "key for a certificate": ("second.key", None, "--ssl-certfile .*second.key holds no certificate"),
    "certificate for a key": ("first.crt", "second.crt", "--ssl-keyfile .*second.crt holds no private key"),
    "another's key": ("first.crt", "second.key", "--ssl-certfile .*--ssl-keyfile .*not that of the certificate"),
    "another's key of the same type": (
        "first.crt",
        "own.key",
        "--ssl-certfile .*--ssl-keyfile .*not that of the certifi",
    ),
    "garbage inside": ("broken.crt", "first.key", "TLS cannot be set up with --ssl-certfile"),
    "locked key": ("first.crt", "locked.key", "--ssl-keyfile .*locked.key is locked with a password"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_files_are_refused_at_the_start(folder: Folder, kept: Path, case: str) -> None:
    certificate, key, said = WRONG_FILES[case]
    for path in kept.iterdir():
        shutil.copy(path, folder.path)
    (folder.path / "broken.crt").write_text("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n")
    locked = serialization.BestAvailableEncryption(b"secret")
    pem = curve_key().private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    (folder.path / "locked.key").write_bytes(pem)
    keyfile = None if key is None else str(folder.path / key)
    with pytest.raises(ConfigError, match=said):
        tls_context(ServerConfig(ssl_certfile=str(folder.path / certificate), ssl_keyfile=keyfile))


def test_a_wrong_file_of_authorities_is_named(folder: Folder, kept: Path) -> None:
    shutil.copy(kept / "second.key", folder.path / "clients.crt")
    with pytest.raises(ConfigError, match=r"--ssl-ca-certs .*clients.crt holds no certificate"):
        tls_context(folder.config())


def test_the_terminal_says_what_to_do_about_a_certificate(
    running: Running, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(kept / "foreign.crt"))
    for url, said in (
        (running.url, f"certificate of {running.url} is not trusted.*SSL_CERT_FILE"),
        (running.url.replace("https", "http"), f"try --url {running.url}"),
    ):
        assert main(["chat", "-q", "Hello", "--url", url]) == 1
        assert re.search(said, capsys.readouterr().err)


def test_a_missing_file_ends_the_command(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--ssl-certfile", str(folder.path / "none.crt")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--ssl-certfile" in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile needs ssl_certfile"),
        ({"enable_ssl_refresh": True}, "enable_ssl_refresh needs ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs needs ssl_ca_certs"),
        ({"ssl_certfile": "c", "ssl_ca_certs": "a"}, "ssl_ca_certs needs ssl_cert_reqs.* 2 .* 1 "),
    ],
    ids=str,
)
def test_settings_that_lack_another_say_so(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ServerConfig.model_validate(settings)
