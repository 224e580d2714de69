"""The generated pages are those of the code, every page is in the navigation, and the lists of names are true."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.config.leaves import leaves
from frame.core.plugin_host.kinds import KINDS
from frame.testing import SUITES
from frame.vllm_names.arguments import TRANSLATIONS
from frame.vllm_names.unused import UNUSED

DOCS = Path(__file__).parents[2] / "docs"
ARGUMENTS = (DOCS / "reference" / "vllm-arguments.md").read_text(encoding="utf-8")
#: A value for each renamed argument, and a setting that it must reach.
EXAMPLES: dict[str, tuple[Any, str, Any]] = {
    "distributed_executor_backend": ("mp", "executor", "process"),
    "kv_transfer_config": ({"kv_connector": "disk", "kv_role": "kv_producer"}, "kv_role", "producer"),
    "kv_offloading_size": (8, "kv_connector", "offload"),
    "kv_events_config": (
        {"enable_kv_cache_events": True, "publisher": "zmq"},
        "kv_events_endpoint",
        "tcp://127.0.0.1:5557",
    ),
    "attention_config": ({"backend": "torch"}, "attention_backend", "torch"),
    "speculative_config": ({"method": "ngram", "num_speculative_tokens": 3}, "num_speculative_tokens", 3),
    "eplb_config": ({"window_size": 9}, "eplb_window_size", 9),
    "profiler_config": ({"profiler": "torch", "torch_profiler_dir": "/traces"}, "profile_dir", "/traces"),
    "structured_outputs_config": ({"backend": "guidance"}, "structured_outputs_backend", "guidance"),
    "worker_extension_cls": ("weights", "worker_extension", "weights"),
    "guided_decoding_backend": ("guidance", "structured_outputs_backend", "guidance"),
    "pooler_config": ({"pooling_type": "CLS", "logit_bias": 0.5}, "pooler_logit_bias", 0.5),
    "task": ("embed", "convert", "embed"),
    "spec_method": ("ngram", "speculator", "ngram"),
    "spec_tokens": (3, "num_speculative_tokens", 3),
    "spec_model": ("ngram", "speculator", "ngram"),
    "optimization_level": (0, "enforce_eager", True),
    "compilation_config": ({"cudagraph_mode": "NONE"}, "enforce_eager", True),
    "cudagraph_capture_sizes": ([1, 2], "plugin", {"cuda": {"graph_sizes": [1, 2]}}),
    "cuda_graph_sizes": ([1, 2], "plugin", {"cuda": {"graph_sizes": [1, 2]}}),
    "max_cudagraph_capture_size": (2, "plugin", {"cuda": {"graph_sizes": [1, 2]}}),
    "disable_cascade_attn": (True, "shared_prefix_min_tokens", 0),
    "shutdown_timeout": (5, "drain_seconds", 5.0),
    "device": ("cpu", "platform", "cpu"),
    "disable_uvicorn_access_log": (True, "disable_access_log", True),
    "disable_fastapi_docs": (True, "openapi", False),
    "h11_max_incomplete_event_size": (8192, "max_head_bytes", 8192),
    "h11_max_header_count": (100, "max_headers", 100),
    "enable_log_requests": (True, "metrics_sinks", ["log"]),
    "enable_log_outputs": (True, "plugin", {"log": {"outputs": True}}),
    "max_log_len": (99, "plugin", {"log": {"max_chars": 99}}),
    "otlp_traces_endpoint": ("http://c:4318", "metrics_sinks", ["otel"]),
}


def generator() -> ModuleType:
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    for name, text in generator().pages().items():
        assert (DOCS / "reference" / name).read_text(encoding="utf-8") == text, f"{name} is old: run `make docs`"


def test_code_on_pages_is_that_of_the_files_that_tests_run() -> None:
    generator()
    for name, text in importlib.import_module("included").pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"{name} shows old code: run `make docs`"
        assert "--8<--" not in text


def test_every_part_of_the_example_plugin_that_is_marked_for_a_page_is_on_one() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    example = DOCS.parent / "tests" / "example_plugin" / "frame_example"
    marked = {
        f"{path.name}:{name}"
        for path in example.glob("*.py")
        for name in re.findall(r"--8<-- \[start:(\w+)\]", path.read_text(encoding="utf-8"))
    }
    assert marked
    assert {one for one in marked if f"frame_example/{one} -->" not in text} == set()


def test_every_name_of_the_contract_is_in_its_reference() -> None:
    generator()
    pages = importlib.import_module("plugin_reference").pages()
    for area in ("interfaces", "layers", "ops", "settings", "testing"):
        page = pages[f"plugin-{area}.md"]
        there = set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
        assert there == set(dir(importlib.import_module(f"frame.{area}"))), area
    hooks = dict(re.findall(r"^## (\w+)\n(.+?)(?=\n## |\Z)", pages["plugin-hooks.md"], re.MULTILINE | re.DOTALL))
    assert set(hooks) == {kind.hook for kind in KINDS.values()}
    assert all("builds" in about for about in hooks.values()), "each says who builds its plugins"


def test_every_suite_is_on_the_page_of_the_contract() -> None:
    text = (DOCS / "plugins" / "contract.md").read_text(encoding="utf-8")
    assert [kind for kind, suite in SUITES.items() if f"`{suite.__name__}`" not in text] == []


def test_every_page_is_in_the_navigation() -> None:
    settings = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load(settings)["nav"], width=1000)))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert there <= listed, there - listed


def rows(title: str) -> list[list[str]]:
    section = ARGUMENTS.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_the_list_of_renamed_arguments_is_true() -> None:
    names = [row[0].strip("`") for row in rows("Other names")]
    assert names == list(TRANSLATIONS) == list(EXAMPLES)
    for name, (value, setting, ours) in EXAMPLES.items():
        config = from_flat({name: value})
        section = config if setting == "plugin" else getattr(config, leaves()[setting].section)
        assert getattr(section, setting) == ours


@pytest.mark.parametrize("row", rows("Other values"), ids=lambda row: row[0])
def test_a_renamed_value_means_ours(row: list[str]) -> None:
    (name, theirs), (same, ours) = (cell.strip("`").split("=") for cell in row)
    assert name == same
    assert from_flat({name: theirs}) == from_flat({name: ours})


@pytest.mark.parametrize("row", rows("Without a part to act on"), ids=lambda row: row[0])
def test_an_argument_without_effect_is_judged_as_listed(row: list[str]) -> None:
    name, accepted, reason = row[0].strip("`"), row[1], row[2]
    assert name in UNUSED
    if accepted == "any":
        assert from_flat({name: "something"}) == from_flat({})
        return
    for value in re.findall(r"`([^`]*)`", accepted):
        assert from_flat({name: ast.literal_eval(value)}) == from_flat({})
    with pytest.raises(ConfigError, match=re.escape(reason)):
        from_flat({name: "something"})


def test_arguments_without_a_part_are_in_order() -> None:
    assert list(UNUSED) == sorted(UNUSED)
