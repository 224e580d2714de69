"""Fits the documentation site to the repository: adds the reference of the plugin API, and keeps links within the site.

Hooks of mkdocs. The pages of the reference are made from sources (signatures, docstrings, comments of fields), which
are read and not imported; they are part of the site only. Pages may link to files outside of docs, which readers of the
repository can open; on the site such a link becomes its text, or the file takes the place of the paragraph.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "frame"
#: A comment with a file, above a paragraph that readers of the repository see in its place: on the site it is the file.
_ELSEWHERE = re.compile(r"<!-- on the site: (\S+) -->\n(?:.+\n?)+")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_ABOUT = {
    "interfaces": "What plugins implement, and what crosses between the parts of frame.",
    "layers": "Layers that models are put together from.",
    "ops": "The ops that a platform may override, and the references that its own ones are made of.",
    "settings": "What commands and plugins use of the configuration.",
    "testing": "Contract suites and test doubles for plugin authors. The suites need `pip install 'frame-llm[test]'`.",
}


def pages() -> dict[str, str]:
    """File name → content of a page for the hooks, and of one for each module that plugins import."""
    made = {f"plugin-{area}.md": "\n\n".join(_area(area, about)) for area, about in _ABOUT.items()}
    return {"plugin-hooks.md": "\n\n".join(_hooks()), **made}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to the site; called by mkdocs."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def on_page_markdown(text: str, *, page: Any, **_: Any) -> str:
    """The text of a page as the site shows it; called by mkdocs."""
    name = page.file.src_uri
    text = _ELSEWHERE.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8").replace("](docs/", "]("), text)
    if name == "plugins/api.md":
        text = "\n\n".join((text, "The pages:", _links()))
    return _LINK.sub(lambda link: link[1] if _leaves_docs(name, link[2]) else link[0], text)


def _links() -> str:
    areas = {"plugin-hooks.md": "Hooks", **{f"plugin-{area}.md": f"`frame.{area}`" for area in _ABOUT}}
    return "\n".join(f"- [{title}](../reference/{page})" for page, title in areas.items())


def _leaves_docs(page: str, target: str) -> bool:
    return "://" not in target and posixpath.normpath(posixpath.join(posixpath.dirname(page), target)).startswith("../")


def _hooks() -> Iterator[str]:
    source = _source("frame.core.plugin_host.kinds")
    tree, lines = _parse(source), source.read_text(encoding="utf-8").splitlines()
    yield "# Plugin API: hooks"
    yield ast.get_docstring(tree) or ""
    table = next(node for node in tree.body if isinstance(node, ast.Assign) and "KINDS" in _targets(node))
    for kind in table.value.values if isinstance(table.value, ast.Dict) else ():
        hook, noun, *interface = (ast.literal_eval(argument) for argument in getattr(kind, "args", ()))
        yield f"## {hook}"
        yield _fenced(f"{hook}() -> list[Provider]")
        classes = f"`frame.interfaces.{interface[0].partition(':')[2]}` classes" if interface else "classes"
        yield f"Each provider names a {noun}; the targets are {classes}."
        yield _comment(kind, lines)


def _area(area: str, about: str) -> Iterator[str]:
    yield f"# Plugin API: frame.{area}"
    yield f"{about} The names below are imported from `frame.{area}`."
    for home, names in _homes(area):
        source = _source(home)
        tree = _parse(source)
        yield f"## {home.rpartition('.')[2].replace('_', ' ')}"
        yield ast.get_docstring(tree) or ""
        for name in names:
            yield from _named(name, tree, source)


def _homes(area: str) -> Iterator[tuple[str, list[str]]]:
    """The modules that define the names of a facade module, as its imports for type checkers say."""
    package = f"frame.{area}"
    for block in _parse(_source(package)).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            homes: dict[str, list[str]] = {}
            for node in block.body:
                if isinstance(node, ast.ImportFrom):
                    module = f"{package}.{node.module}" if node.level else str(node.module)
                    homes.setdefault(module, []).extend(alias.name for alias in node.names)
            yield from homes.items()


def _named(name: str, tree: ast.Module, source: Path) -> Iterator[str]:
    lines = source.read_text(encoding="utf-8").splitlines()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield f"### {name}"
            yield _fenced(ast.unparse(ast.ClassDef(name, node.bases, node.keywords, [ast.Pass()], [])).split("\n")[0])
            yield _text(node)
            yield from _members(node, lines, tree, source)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            yield f"### {name}"
            yield _fenced(_signature(node))
            yield _text(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node):
            yield f"### {name}"
            yield _fenced(ast.unparse(node))
            yield _comment(node, lines)


def _members(node: ast.ClassDef, lines: list[str], tree: ast.Module, source: Path) -> Iterator[str]:
    fields = [field for field in node.body if isinstance(field, (ast.Assign, ast.AnnAssign))]
    rows = [row for field in fields for row in _field(field, lines)]
    if rows:
        head = ("| field | type | default | meaning |", "| --- | --- | --- | --- |")
        yield "\n".join((*head, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)))
    for member in node.body:
        found = _reference(member, tree, source) if isinstance(member, ast.Assign) else member
        if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if found.name.startswith("_") and found.name != "__init__":
            continue
        yield _fenced(_signature(found))
        if text := _text(found):
            yield text


def _field(field: ast.Assign | ast.AnnAssign, lines: list[str]) -> Iterator[tuple[str, str, str, str]]:
    name = next(iter(_targets(field)), "_")
    if name.startswith("_") or (isinstance(field, ast.Assign) and isinstance(field.value, ast.Call)):
        return
    kind = ast.unparse(field.annotation) if isinstance(field, ast.AnnAssign) else ""
    default = "" if field.value is None else ast.unparse(field.value)
    yield f"`{name}`", f"`{kind}`" if kind else "", f"`{default}`" if default else "", _comment(field, lines)


def _reference(member: ast.Assign, tree: ast.Module, source: Path) -> ast.stmt | None:
    """The function behind `name = staticmethod(module.function)`, of a module beside this one."""
    call = member.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "staticmethod"):
        return None
    target = call.args[0]
    if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
        return None
    beside = _parse(source.parent / f"{target.value.id}.py").body
    return next((one for one in beside if isinstance(one, ast.FunctionDef) and one.name == target.attr), None)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The head of a function with its decorators, wrapped where it is long."""
    bare = type(node)(**{**vars(node), "body": [ast.Pass()], "decorator_list": []})
    head = ast.unparse(bare).rpartition("\n")[0].removesuffix(":")
    if len(head) > 100:
        before, _, after = head.partition("(")
        inner, _, returns = after.rpartition(") -> ")
        arguments = re.split(r", (?=(?:[^\[\]()]|\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]|\([^()]*\))*$)", inner)
        head = f"{before}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f") -> {returns}"
    marks = [ast.unparse(one) for one in node.decorator_list]
    return "\n".join((*(f"@{mark}" for mark in marks), head))


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets: Iterable[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _comment(node: ast.stmt | ast.expr, lines: list[str]) -> str:
    """What `#:` says above the statement, or `#` behind it."""
    found: list[str] = []
    number = node.lineno - 2
    while number >= 0 and lines[number].strip().startswith("#:"):
        found.insert(0, lines[number].strip().removeprefix("#:").strip())
        number -= 1
    last = lines[(node.end_lineno or node.lineno) - 1]
    behind = re.search(r"\s{2}#:?\s*(?!type:|noqa|fmt:)(.*)$", last)
    if behind is not None:
        found.append(re.sub(r"\s*# (type: ignore|noqa).*$", "", behind[1]))
    return " ".join(found)


def _text(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return cleandoc(ast.get_docstring(node) or "")


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _source(module: str) -> Path:
    path = SOURCES.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
