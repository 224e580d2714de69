"""The example of the page on offloading: its server keeps in host memory what its device's cache has no room for."""

from __future__ import annotations

import re
import shlex
import subprocess

import httpx

from tests.docs.blocks import ROOT, SERVER, commands, marked_file
from tests.server.running import REAL, server

PAGE = ROOT / "docs" / "offloading.md"


def number(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


def test_the_page_s_server_finds_in_host_memory_what_its_device_forgot() -> None:
    serve, ask, *_ = commands(PAGE)
    named = set(re.findall(r"`(frame_kv_connector_\w+)`", PAGE.read_text(encoding="utf-8")))
    with server(REAL, *shlex.split(serve)[2:], "--num-threads", "1") as running:
        first, *rest = [f"Story {index}: " + "the fox went down to the sea again. " * 30 for index in range(4)]

        def told(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["choices"][0]["text"]
            return text

        script = marked_file(PAGE, "stories.sh").replace(SERVER, running.url)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
        said = 'frame_kv_connector_offload_hit_tokens_total{engine="0",model_name="demo"} 272.0\n'
        assert (done.stdout, said in PAGE.read_text(encoding="utf-8")) == (said, True), done.stderr
        begun = told(first)
        for prompt in rest:
            told(prompt)
        assert told(first) == begun
        words = shlex.split(ask.replace(SERVER, running.url))
        done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        text = httpx.get(f"{running.url}/metrics").text
        assert number(text, "frame_kv_connector_offload_hit_tokens_total") > 100
        assert number(text, "frame_kv_connector_offload_load_bytes_total") > 0
        there = set(re.findall(r"^# TYPE (frame_kv_connector_\w+)", text, re.MULTILINE))
        seldom = {f"frame_kv_connector_offload_{name}_blocks_total" for name in ("failed", "unsaved")}
        seldom.add("frame_kv_connector_offload_saved_states_total")  # of other models
        seldom |= {name for name in named if re.search("_(checked|shared|disk)_", name)}
        assert named - seldom == there - seldom
        running.until_said("offloading: 0.5 GiB of host memory keep")
