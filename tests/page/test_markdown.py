"""The page's Markdown without a browser: what lines become, and that no line costs more than its length."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from frame.plugins.endpoints import page

MODULE = Path(page.__file__).with_name("static") / "markdown.js"
#: Shows elements as nested lists [kind, ...children], and counts them.
SCRIPT = """
import { readFileSync } from "node:fs";
let count = 0;
globalThis.document = {
  createElement: (kind) => {
    count += 1;
    const tree = [kind];
    return {
      tree, dataset: {}, tagName: kind.toUpperCase(),
      append: (...more) => tree.push(...more.map((one) => one.tree ?? one)),
      get childNodes() { return tree.slice(1); },
    };
  },
  createDocumentFragment: () => document.createElement("all"),
  createTextNode: (text) => text,
};
const { lastBlock, render } = await import("data:text/javascript;base64," + process.argv[1]);
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
  count = 0;
  const began = performance.now();
  const { tree } = render(text);
  lastBlock(text);
  const seconds = (performance.now() - began) / 1000;
  console.log(JSON.stringify({ seconds, count, tree: text.length < 200 ? tree.slice(1) : null }));
}
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")


def rendered(*texts: str) -> list[dict[str, object]]:
    module = base64.b64encode(MODULE.read_bytes()).decode()
    command = ["node", "--input-type=module", "-e", SCRIPT, module]
    given = json.dumps(texts)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_lines_become_elements() -> None:
    trees = {
        "# Title ##": [["h3", "Title"]],
        "## C# and F#": [["h4", "C# and F#"]],
        "# ": [["h3"]],
        "#title": [["p", "#title"]],
        "```py\nx\n```": [["pre", ["code", "x"]]],
        "~~~\nx": [["pre", ["code", "x"]]],
        "```a`": [["p", "```", "a", "`"]],
        "a ``b `c`": [["p", "a ", "``", "b ", ["code", "c"]]],
        "|a|b|\n| - | :-: |\n|1|": [["div", ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                                               ["tbody", ["tr", ["td", "1"]]]]]],
        "a|b\nc|d": [["p", "a|b\nc|d"]],
    }  # fmt: skip
    assert [each["tree"] for each in rendered(*trees)] == list(trees.values())


@pytest.mark.parametrize(
    "text",
    [
        "# a" + " " * 20_000 + "x",
        "# " + "#" * 20_000 + "x",
        "a|b\n" + " " * 50_000 + "x",
        "a|b\n-|" + " " * 50_000 + "x",
        "```" + " " * 50_000 + "`",
        "```" + "a" * 50_000 + "`",
        "~" * 50_000 + "`",
        "a" + "`" * 100_000,
        "- " * 50_000 + "x",
    ],
    ids=lambda text: text[:6].strip(),
)
def test_a_long_line_takes_no_long_time(text: str) -> None:
    (found,) = rendered(text)
    assert found["seconds"] < 1, f"{found['seconds']} s"


def test_a_table_has_no_more_cells_than_its_text() -> None:
    text = "|a" * 500 + "\n" + "-|" * 500 + "\n" + "|\n" * 500
    (found,) = rendered(text)
    assert int(str(found["count"])) < len(text)


@pytest.mark.parametrize(
    "text",
    ["a\n\n" * 200_000, "*a* b " * 200_000, "> a\n>\n" * 200_000, "- *a* b " + "*a* b " * 200_000],
    ids=["blocks", "inline", "quote", "item"],
)
def test_an_element_may_have_more_children_than_a_call_has_arguments(text: str) -> None:
    (found,) = rendered(text)
    assert int(str(found["count"])) > 200_000
