"""Variables of vLLM's: one is taken, the others get a line each."""

from __future__ import annotations

import httpx
import pytest

from frame.vllm_names.environment import api_key_of, lines_about
from tests.server.running import FAKE, server


def test_each_variable_gets_a_line_without_its_value() -> None:
    lines = lines_about({"VLLM_ATTENTION_BACKEND": "FLASH", "VLLM_ODD": "secret", "VLLM_API_KEY": "k", "HOME": "/root"})
    assert lines == [
        "VLLM_ATTENTION_BACKEND is set, and frame does not read it: give --attention-backend",
        "VLLM_ODD is set, and frame does not read it: it has no effect here",
    ]
    assert "secret" not in "".join(lines)


def test_an_empty_key_counts_as_unset() -> None:
    assert api_key_of({}) == api_key_of({"VLLM_API_KEY": ""}) == []


def test_a_server_takes_the_key_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-the-environment")
    with server(FAKE) as running:
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer from-the-environment"}
        assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 200
