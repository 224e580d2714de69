"""How servers start, survive and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.server import ServerConfig
from frame.core.config.tree import FrameConfig
from frame.core.processes.launcher import Launcher
from frame.core.processes.listeners import bind, bind_admin
from tests.server.running import FAKE, REAL, Running, alive, server, until

BODY = {"prompt": "once upon a time", "max_tokens": 300, "ignore_eos": True}
#: A child that does nothing until its parent hangs up.
IDLE = [
    sys.executable, "-c",
    "import os, sys\nend = int(sys.argv[sys.argv.index('--control-fd') + 1])\nwhile os.read(end, 999):\n    pass",
]  # fmt: skip
SLOW = ("--plugin.fake.delay", "0.01", "--plugin.fake.vocab_size", "2048", "--disable-access-log")


def post_in_thread(url: str, body: dict[str, Any], answers: list[Any]) -> threading.Thread:
    def post() -> None:
        try:
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
        except httpx.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server whose processes may die as often as tests like."""
    settings = ("--plugin.fake.startup", "1", "--hang-seconds", "3", "--max-engine-restarts", "20")
    with server(FAKE, *SLOW, *settings) as running:
        yield running


def test_a_killed_engine_is_reported_and_started_again(running: Running) -> None:
    answers: list[Any] = []
    thread = post_in_thread(running.url, BODY, answers)
    until(lambda: running.metric("frame_num_requests_running") == 1)
    pid = running.children()["engine"]
    os.kill(pid, signal.SIGKILL)
    health = [running.engine()]
    until(lambda: health.append(running.engine()) or health[-1].status_code == 503)
    assert "engine process" in health[-1].json()["error"]["message"]
    assert [running.engine(path).status_code for path in ("/live", "/startup")] == [200, 200]
    thread.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert running.engine().status_code == 200
    assert running.children()["engine"] != pid
    assert httpx.post(f"{running.url}/v1/completions", json={**BODY, "max_tokens": 3}).status_code == 200
    running.until_said("SIGKILL")


def test_an_engine_that_hangs_or_that_a_request_ends_is_replaced(running: Running) -> None:
    body = {**BODY, "max_tokens": 20}
    hung = httpx.post(f"{running.url}/v1/completions", json={**body, "extra_args": {"fault": "hang"}}, timeout=60)
    assert hung.json()["usage"]["completion_tokens"] == 20
    running.until_said(r"hung: no step ended within 3 seconds \(--hang-seconds\)")
    fatal = httpx.post(f"{running.url}/v1/completions", json={**body, "extra_args": {"fault": "exit"}}, timeout=60)
    assert fatal.status_code == 500
    assert "status 7 each time the request was computed" in fatal.json()["error"]["message"]
    assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).status_code == 200


@pytest.mark.matrix
def test_an_engine_that_is_stopped_while_it_waits_is_replaced(running: Running) -> None:
    until(lambda: running.engine().status_code == 200)
    pid, count = running.children()["engine"], running.text.count("hung: no step ended")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: running.text.count("hung: no step ended") > count)
    assert not alive(pid)
    answer = httpx.post(f"{running.url}/v1/completions", json={**BODY, "max_tokens": 3}, timeout=60)
    assert answer.status_code == 200


def test_a_killed_api_process_is_started_again(running: Running) -> None:
    pid, count = running.children()["api"], running.text.count("serving demo at")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    # while the next one starts, nobody is refused
    again = httpx.post(f"{running.url}/v1/completions", json={**BODY, "max_tokens": 3}, timeout=60)
    assert again.status_code == 200
    until(lambda: running.text.count("serving demo at") == count + 1)


def test_a_killed_api_process_breaks_its_own_connections_only() -> None:
    with server(FAKE, *SLOW, "--api-server-count", "2") as running:
        answers: list[Any] = []
        body = {**BODY, "max_tokens": 400}
        threads = [post_in_thread(running.url, body, answers) for _ in range(8)]
        until(lambda: running.metric("frame_num_requests_running") == 8, 60)
        pid = running.children()["engine"]
        os.kill(running.children_named("api")[0], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        whole = [answer for answer in answers if isinstance(answer, httpx.Response)]
        assert len(answers) == 8
        assert {answer.json()["usage"]["completion_tokens"] for answer in whole} <= {400}
        until(lambda: running.text.count("serving demo at") == 2, 60, lambda: running.text)
        until(lambda: running.metric("frame_num_requests_running") == 0)  # those of the dead process ended with it
        after: list[Any] = []
        for thread in [post_in_thread(running.url, {**BODY, "max_tokens": 3}, after) for _ in range(6)]:
            thread.join(60)
        assert [answer.status_code for answer in after] == [200] * 6
        assert running.children()["engine"] == pid


@pytest.mark.parametrize(("soft", "hard", "told"), [(64, 64, True), (64, 512, False)])
def test_files_may_be_open_as_far_as_the_limit_allows(soft: int, hard: int, told: bool) -> None:
    limited = ["bash", "-c", f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"', "-", *FAKE]
    with server(limited) as running:
        api = running.children()["api"]
        limits = Path(f"/proc/{api}/limits").read_text()
        assert re.search(rf"Max open files +{hard} +{hard} ", limits)
        warning = "64 files may be open, and further connections are closed at once; raise it with ulimit -n"
        assert (warning in running.text) is told


def test_too_many_engine_deaths_end_the_server() -> None:
    with server(FAKE, *SLOW, "--max-engine-restarts", "0") as running:
        os.kill(running.children()["engine"], signal.SIGKILL)
        assert running.wait() == 1
        assert "deaths in a row" in running.text.splitlines()[-1]
        assert running.text.count("deaths in a row") == 1


def test_a_signal_drains_and_then_ends() -> None:
    with server(FAKE, *SLOW) as running:
        children = running.children()
        assert set(children) == {"api", "engine"}
        answers: list[Any] = []
        thread = post_in_thread(running.url, {**BODY, "max_tokens": 500}, answers)
        until(lambda: running.metric("frame_num_requests_running") == 1)
        running.process.send_signal(signal.SIGINT)
        until(lambda: "stopping" in running.text)
        until(lambda: httpx.get(f"{running.url}/health").status_code == 503)
        assert httpx.post(f"{running.url}/v1/completions", json=BODY).status_code == 503
        thread.join(60)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 500
        assert running.wait() == 0
        assert not any(alive(pid) for pid in children.values())


def test_a_signal_while_the_server_starts_ends_it_at_once_with_one_line() -> None:
    running = Running(FAKE, *SLOW, "--plugin.fake.startup", "30")
    try:
        until(lambda: "engine" in running.children() and "api" in running.children())
        children = running.children()
        began = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0
        assert time.monotonic() - began < 20
        assert not any(alive(pid) for pid in children.values())
        assert running.text.count("stopping") == 1
        assert running.lines[-1].endswith("stopping: the server had not started yet\n")
    finally:
        running.process.kill()


@pytest.mark.matrix
def test_a_signal_while_the_engine_is_started_again_drains_what_is_replayed() -> None:
    with server(FAKE, *SLOW, "--plugin.fake.startup", "1") as running:
        answers: list[Any] = []
        thread = post_in_thread(running.url, {**BODY, "max_tokens": 100}, answers)
        until(lambda: running.metric("frame_num_requests_running") == 1)
        os.kill(running.children()["engine"], signal.SIGKILL)
        until(lambda: "starting it again" in running.text)
        running.process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert answers[0].json()["usage"]["completion_tokens"] == 100
        assert running.wait() == 0


def test_a_second_signal_ends_at_once() -> None:
    with server(FAKE, *SLOW) as running:
        children = running.children()
        answers: list[Any] = []
        post_in_thread(running.url, {**BODY, "max_tokens": 480}, answers)
        until(lambda: running.metric("frame_num_requests_running") == 1)
        running.process.send_signal(signal.SIGINT)
        until(lambda: "stopping" in running.text)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert not any(alive(pid) for pid in children.values())
        assert "Traceback" not in running.text


async def test_a_part_that_cannot_be_started_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def spawn(*arguments: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("frame.core.processes.api_supervisor.spawn", spawn)
    launcher = Launcher(FrameConfig(), [bind(ServerConfig(port=0))], IDLE)
    assert await asyncio.wait_for(launcher.run(), 60) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "frame: [Errno 11] Resource temporarily unavailable"


async def test_a_server_ends_though_nobody_reads_its_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spawn(*arguments: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr("frame.core.processes.api_supervisor.spawn", spawn)
    launcher = Launcher(FrameConfig(), [bind(ServerConfig(port=0))], IDLE)
    stderr = os.fdopen(writing, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stderr)
    try:
        assert await asyncio.wait_for(launcher.run(), 60) == 1
    finally:
        with contextlib.suppress(BrokenPipeError):
            stderr.close()


@pytest.mark.matrix
def test_a_server_serves_with_a_closed_standard_input() -> None:
    with server(["sh", "-c", 'exec "$0" "$@" <&-', *REAL]) as running:
        assert httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60).status_code == 200


@pytest.mark.matrix
def test_a_drain_ends_after_its_time() -> None:
    with server(FAKE, *SLOW, "--drain-seconds", "0.3") as running:
        answers: list[Any] = []
        threads = [
            post_in_thread(running.url, {**BODY, "max_tokens": 400, "stream": stream}, answers)
            for stream in (True, False)
        ]
        until(lambda: running.metric("frame_num_requests_running") == 2)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        for thread in threads:
            thread.join(60)
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        for answer in answers:
            assert "did not end within 0.3 seconds (--drain-seconds)" in answer.text
        assert "Traceback" not in running.text


def fails(command: list[str], *arguments: str) -> tuple[int, str]:
    running = Running(command, *arguments)
    try:
        return running.wait(60), running.text
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        ({"broken": "the weights are torn"}, "frame: the weights are torn"),
        ({"dies": 3}, "frame: the engine process ended with status 3 before it was ready"),
        ({"startup": 30}, "not ready after 1 sec"),
    ],
)
async def test_an_engine_that_is_never_ready_ends_the_server(
    fake: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("frame.core.processes.api_supervisor.python_command", lambda *_: IDLE)
    limit = 1 if "startup" in fake else 60
    config = FrameConfig.model_validate({"server": {"port": 0, "ready_seconds": limit}, "plugin": {"fake": fake}})
    engine = [sys.executable, str(Path(__file__).parents[1] / "server" / "fake_engine.py")]
    assert await asyncio.wait_for(Launcher(config, [bind(config.server)], engine).run(), 60) == 1
    text = capfd.readouterr().err
    assert words in text.splitlines()[-1]
    assert "Traceback" not in text


def test_a_broken_tokenizer_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    status, text = fails(FAKE, *SLOW, "--tokenizer", str(tmp_path))
    assert status == 1
    assert f"frame: the tokenizer in '{tmp_path}' cannot be loaded: " in text.splitlines()[-1]
    assert "Traceback" not in text


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (("/nowhere/model",), "/nowhere/model", 1),
        (("--port", "99999"), "port", 1),
        (("--max-num-seqs", "many"), "many", None),
        (("--attention-backend", "fa9"), "fa9", 1),
        (("--no-such-flag", "1"), "no-such-flag", 2),
        (("-tp", "3"), "cannot be split over 3 ranks; sizes that work: 1, 2, ", 1),
    ],
)
def test_bad_settings_end_at_once_with_one_sentence(arguments: tuple[str, ...], words: str, status: int | None) -> None:
    done = subprocess.run([*REAL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status or (status is None and done.returncode in (1, 2))
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", [{"host": "a" * 70 + ".x"}, {"uds": "/tmp/" + "a" * 120}], ids=["host", "uds"])
def test_a_place_that_is_none_is_named_with_the_reason(place: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*: .*too long"):
        bind(ServerConfig(**place))


def test_a_taken_port_ends_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run([*REAL, "--port", port], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr


KEYS = ("--api-key", "one", "--api-key", "two")


def test_keys_guard_every_route_and_nothing_outlives_a_killed_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with server(FAKE, *SLOW, *KEYS, "--allowed-origins", "https://app.example", "--root-path", "/llm") as running:
        check_keys_also_behind_the_prefix_of_a_proxy(running)
        children = running.children()
        running.process.kill()
        running.wait()
        until(lambda: not any(alive(pid) for pid in children.values()))
    assert not list(tmp_path.iterdir())


def check_keys_also_behind_the_prefix_of_a_proxy(running: Running) -> None:
    for prefix in ("", "/llm"):
        assert httpx.get(f"{running.url}{prefix}/health").status_code == 200
        assert httpx.get(f"{running.url}{prefix}/v1/models").status_code == 401
        answer = httpx.get(f"{running.url}{prefix}/v1/models", headers={"x-api-key": "one"})
        assert answer.json()["data"][0]["id"] == "demo"
    paths = httpx.get(f"{running.url}/openapi.json", headers={"x-api-key": "one"}).json()["paths"]
    walked = [(path.replace("{name}", "demo"), method.upper()) for path, ways in paths.items() for method in ways]
    walked += [("/openapi.json", "GET"), ("/nothing", "GET"), ("/v1/chat/completions", "DELETE")]
    assert len(walked) >= 12
    for path, method in walked:
        for headers in ({}, {"Authorization": "Bearer three"}, {"x-api-key": "three"}, {"Host": "health"}):
            status = httpx.request(method, running.url + path, headers=headers).status_code
            assert status == (200 if path in ("/health", "/live", "/ping", "/ready", "/startup") else 401), (
                path,
                headers,
            )
        for headers in ({"Authorization": "Bearer two"}, {"x-api-key": "one"}):
            assert httpx.request(method, running.url + path, headers=headers).status_code != 401
    preflight = httpx.options(
        f"{running.url}/v1/models",
        headers={"Origin": "https://app.example", "Access-Control-Request-Method": "GET"},
    )
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "two" not in Path(f"/proc/{running.children()['engine']}/cmdline").read_text()
    terminal = [sys.executable, "-m", "frame", "complete", "--url", running.url, "-q", "once upon"]
    denied = subprocess.run(terminal, capture_output=True, text=True, timeout=60, check=False)
    assert denied.returncode == 1
    assert "a valid API key is needed" in denied.stderr
    done = subprocess.run(
        [*terminal, "--api-key", "two", "--max-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    chat = [sys.executable, "-m", "frame", "chat", "--url", running.url, "--api-key", "one", "--max-tokens", "5"]
    talk = subprocess.run(chat, input="hello\nagain\n", capture_output=True, text=True, timeout=60, check=False)
    assert talk.returncode == 0
    assert talk.stdout.count("\n") == 2  # the answers alone, since nobody types at a terminal


def test_terminal_clients_say_when_there_is_no_server() -> None:
    for name in ("chat", "complete"):
        command = [sys.executable, "-m", "frame", name, "--url", "http://127.0.0.1:9", "-q", "hi"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("frame: no server answers at http://127.0.0.1:9: Connection refused")


@pytest.mark.matrix
def test_strict_fields_request_ids_and_templates_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "frame.sock"
    template = tmp_path / "plain.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    settings = ("--strict-fields", "--enable-request-id-headers", "--trust-request-chat-template")
    running = Running(FAKE, *SLOW, *settings, "--chat-template", str(template), "--uds", str(path))
    try:
        until(lambda: f"at unix:{path}" in running.text, 60, lambda: running.text)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", timeout=60) as client:
            check_strict_fields_request_ids_and_templates(client)
    finally:
        running.stop()
    assert not path.exists()


def check_strict_fields_request_ids_and_templates(client: httpx.Client) -> None:
    assert client.get("/v1/models").status_code == 200
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "once upon"}]}
    plain = client.post("/tokenize", json={"prompt": "once upon", "add_special_tokens": False}).json()
    assert client.post("/tokenize", json=chat).json()["tokens"] == plain["tokens"]
    for sent, size in (
        ("{{ messages[0].content }}!", 1),
        ("/etc/passwd", None),
        ("{{ messages.__class__ }}", None),
    ):
        body = {**chat, "chat_template": sent, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == (400 if size is None else 200), answer.text
        assert "root:" not in answer.text
        if size is not None:
            assert answer.json()["usage"]["prompt_tokens"] == len(plain["tokens"]) + size
    response = client.post("/v1/completions", json={"prompt": "x", "tempreture": 1})
    assert response.status_code == 400
    assert "tempreture" in response.json()["error"]["message"]
    assert len(response.headers["x-request-id"]) == 32
    assert client.post("/v1/completions", json={**BODY, "max_tokens": 2}).status_code == 200


def test_socket_files_are_closed_to_others_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    listen = socket.socket.listen

    def noting(self: socket.socket, *backlog: int) -> None:  # until then nobody can connect
        modes.append(Path(self.getsockname()).stat().st_mode & 0o777)
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", noting)
    before = os.umask(0)
    try:
        with bind(ServerConfig(uds=str(tmp_path / "public"))):
            pass
        admin = bind_admin(ServerConfig(admin_uds=str(tmp_path / "admin")))
        assert admin is not None
        admin.close()
    finally:
        os.umask(before)
    assert modes == [0o660, 0o600]
