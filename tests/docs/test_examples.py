"""What README and docs show runs: Python page by page, terminal lines against a server, flags and files as settings."""

from __future__ import annotations

import json
import operator
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import httpx
import pytest

from frame.core.cli.serve import ServeCommand
from frame.core.config.file import read_config_file
from frame.core.config.flag_parser import FlagParser
from frame.core.config.flags import config_from_arguments
from frame.interfaces import Setup
from tests.docs.blocks import PAGES, ROOT, SERVER, Block, blocks, commands, marked_file
from tests.server.running import REAL, Running, server

README = ROOT / "README.md"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
STRICT = ("-W", "error", "-W", "ignore::DeprecationWarning")
NAME = operator.attrgetter("name")


def python(page: Path, *, needs_server: bool) -> list[Block]:
    return [block for block in blocks(page, "python") if block.runs and block.needs_server == needs_server]


def test_parts_of_our_files_are_in_them() -> None:
    parts = [block for page in PAGES for block in blocks(page, "python") if block.mark.startswith("from: ")]
    assert parts
    for block in parts:
        lines = (ROOT / block.mark.removeprefix("from: ")).read_text(encoding="utf-8").splitlines()
        held = {line.strip() for line in lines}
        assert [line for line in block.text.splitlines() if line.strip() not in held] == [], block.place


def joined(examples: list[Block]) -> str:
    return "\n".join(f"# {block.place}\n{block.text}" for block in examples)


@pytest.fixture(scope="module")
def forked() -> Iterator[subprocess.Popen[str]]:
    """Runs scripts without importing torch for each of them."""
    command = [sys.executable, *STRICT, str(Path(__file__).with_name("forked.py"))]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=ENVIRONMENT, start_new_session=True) as made:
        yield made
        assert made.stdin is not None
        made.stdin.close()
        made.wait(60)


def run(forked: subprocess.Popen[str], code: str, folder: Path) -> str:
    """What a script prints."""
    assert forked.stdin is not None
    assert forked.stdout is not None
    script, output = folder / "example.py", folder / "output"
    script.write_text(code, encoding="utf-8")
    print(json.dumps([str(script), str(folder), str(output)]), file=forked.stdin, flush=True)
    timer = threading.Timer(170, os.killpg, [forked.pid, signal.SIGKILL])
    timer.start()
    status = forked.stdout.readline()
    timer.cancel()
    timer.join()
    assert status == "0\n", Path(f"{output}.err").read_text()
    return output.read_text()


@pytest.mark.some(4)
@pytest.mark.parametrize("page", [page for page in PAGES if python(page, needs_server=False)], ids=NAME)
def test_python_of_a_page_runs_from_top_to_bottom(page: Path, forked: subprocess.Popen[str], tmp_path: Path) -> None:
    assert run(forked, joined(python(page, needs_server=False)), tmp_path).strip()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(REAL, "--num-threads", "1") as running:
        yield running


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if python(page, needs_server=True)], ids=lambda page: page.name
)
def test_clients_of_a_page_get_answers(
    page: Path, running: Running, forked: subprocess.Popen[str], tmp_path: Path
) -> None:
    for block in python(page, needs_server=True):
        assert run(forked, block.text.replace(SERVER, running.url), tmp_path).strip(), block.place


def starting(*words: str) -> list[str]:
    pages = [page for page in PAGES if page.name != "routing.md"]  # test_routing.py has servers and a front for it
    return [line for page in pages for line in commands(page) if line.startswith(words)]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "line",
    # the lines that search metrics are of pages that have tests of their own, with KV connectors
    [
        line
        for line in starting("curl ", "frame chat ", "frame complete ", "frame plugins", "frame collect-env")
        if " | grep " not in line
    ],
)
def test_terminal_lines_get_answers(line: str, running: Running) -> None:
    words = shlex.split(line.replace(SERVER, running.url))
    if words[0] == "curl":
        words[1:1] = ["--silent", "--show-error", "--fail"]
    else:
        words[:1] = [sys.executable, "-m", "frame"]
        words += ["--url", running.url] if words[3] in ("chat", "complete") else []
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", [line for line in starting("frame serve") if "[" not in line])
def test_lines_that_serve_have_the_flags_that_there_are(line: str) -> None:
    parser = FlagParser(prog="frame serve")
    ServeCommand(Setup()).add_arguments(parser)
    config_from_arguments(parser.parse_args(shlex.split(line)[2:]))


def test_every_make_line_has_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in starting("make "):
        assert f"\n{line.split()[1]}:" in makefile, line


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=NAME)
def test_files_of_settings_are_read(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.text, encoding="utf-8")
        parser = FlagParser(prog="frame serve")
        ServeCommand(Setup()).add_arguments(parser)
        config = config_from_arguments(parser.parse_args(["--config", str(file)]))
        assert read_config_file(file)
        assert config.model.max_model_len == 8000


def test_the_plugin_of_the_readme_is_found_and_serves(forked: subprocess.Popen[str], tmp_path: Path) -> None:
    """Laid out as pip would install it; tests/example_plugin is installed for real."""
    import tomllib

    project = tomllib.loads(marked_file(README, "pyproject.toml"))["project"]
    code = marked_file(README, "shortest.py")
    assert len(code.splitlines()) == 12
    (tmp_path / "shortest.py").write_text(code, encoding="utf-8")
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (entry,) = project["entry-points"]["frame"].items()
    (info / "entry_points.txt").write_text(f"[frame]\n{entry[0]} = {entry[1]}\n")
    listed = "import sys\nfrom frame.core.cli.main import main\nsys.exit(main(['plugins']))\n"
    (line,) = (line for line in run(forked, listed, tmp_path).splitlines() if " shortest " in line)
    assert line.endswith("shortest request first")  # the provider's summary
    orders = (
        "from frame import LLM, SamplingParams\n"
        "llm = LLM(scheduling_policy='shortest', max_num_seqs=1)\n"
        "engine = llm.llm_engine\n"
        "for name, ids in (('running', [5]), ('long', [5] * 30), ('short', [5] * 3)):\n"
        "    engine.add_request(name, ids, SamplingParams(max_tokens=4, ignore_eos=True))\n"
        "ended = []\n"
        "while engine.has_unfinished_requests():\n"
        "    ended += [output.request_id for output in engine.step() if output.finished]\n"
        "print(ended.index('short') < ended.index('long'))\n"
    )
    assert run(forked, orders, tmp_path).strip().endswith("True")


def test_values_for_logits_processors_travel_under_both_names(running: Running) -> None:
    for name in ("extra_args", "vllm_xargs"):
        body = {"prompt": "The sea is", "max_tokens": 1, name: {"target_token": 42}}
        assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).status_code == 200
        wrong = httpx.post(f"{running.url}/v1/completions", json={**body, name: [42]}, timeout=60)
        assert wrong.status_code == 400
