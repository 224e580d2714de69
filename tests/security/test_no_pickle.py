"""Nothing that is shipped unpickles, evaluates text or pickles behind its back, and a served request never does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_NAMES = {"eval", "exec"}
#: Calls that pickle without the word, wherever they come from.
_METHODS = {
    "send_pyobj", "recv_pyobj", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "literal_eval",
}  # fmt: skip
_CALLS = {"torch.load", "torch.save", "multiprocessing.Queue", "multiprocessing.Pipe", "multiprocessing.Process",
          "multiprocessing.Manager", "multiprocessing.Pool", "mp.Queue", "mp.Process", "mp.spawn"}  # fmt: skip


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in _MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in _MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in _NAMES | _METHODS:
                yield name
            case ast.Call(func=ast.Attribute(attr=name) as found):
                if name in _METHODS or ast.unparse(found) in _CALLS:
                    yield ast.unparse(found)
            case ast.keyword(arg="allow_pickle"):
                yield "allow_pickle"
            case ast.keyword(arg="trust_remote_code", value=value) if not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield "trust_remote_code"
            case ast.Assert():
                yield "assert"


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle", "from dill import loads", "import marshal as m", "eval('1')", "exec(text)", "torch.load(path)",
        "torch.save(x, path)", "np.load(path, allow_pickle=True)", "socket.recv_pyobj()", "mp.Queue()",
        "dist.broadcast_object_list([x])", "ast.literal_eval(text)", "f(trust_remote_code=True)", "assert safe",
    ],
)  # fmt: skip
def test_the_lint_finds_what_is_planted(planted: str) -> None:
    assert len(list(faults(planted))) == 1


def test_shipped_code_has_none() -> None:
    paths = [path for folder in ("core", "plugins", "kernels") for path in (_ROOT / folder).rglob("*.py")]
    shipped = [path for path in paths if "testing" not in path.parts]
    assert len(shipped) > 200
    found = [f"{path.relative_to(_ROOT)}: {fault}" for path in shipped for fault in faults(path.read_text())]
    assert found == []


_SCRIPT = """
import sys
from frame import LLM, SamplingParams
llm = LLM()
seen = []
sys.addaudithook(lambda event, arguments: seen.append(arguments) if event == "pickle.find_class" else None)
assert llm.generate(["The sea is"], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
sys.exit(repr(seen[:3]) if seen else 0)
"""


@pytest.mark.parametrize(
    "flags",
    # Python has no compiled files of libraries for -O, and what that leaves out is not shipped: see the test above
    [pytest.param((), id="plain"), pytest.param(("-O",), id="optimised", marks=pytest.mark.slow)],
)
def test_generating_never_unpickles(flags: tuple[str, ...]) -> None:
    script = _SCRIPT.replace("assert ", "result = ")
    done = subprocess.run(
        [sys.executable, *flags, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
