"""What launches kernels is built by the compiler that is there, and by none it says so."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

pytest.importorskip("triton")

from frame.plugins.platforms.cuda.compile.launchers import build

SOURCE = """
#include <Python.h>
#include <zlib.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answers", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_answers(void) {
  PyObject *made = PyModule_Create(&module);
  PyModule_AddIntConstant(made, "answer", crc32(0, (const unsigned char *)"frame", 5) ? 42 : 0);
  return made;
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no compiler here")
def test_a_module_is_built_with_its_libraries_and_headers(tmp_path):
    (tmp_path / "answers.c").write_text(SOURCE.replace("zlib.h", "crc.h"))
    (tmp_path / "given").mkdir()
    (tmp_path / "given/crc.h").write_text("unsigned long crc32(unsigned long, const unsigned char *, unsigned int);")
    file = build(
        "answers", str(tmp_path / "answers.c"), str(tmp_path), ["/lib"], [str(tmp_path / "given")], ["libz.so.1"]
    )
    spec = importlib.util.spec_from_file_location("answers", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.answer == 42


def test_without_a_compiler_it_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="CC is not set, and there is neither gcc nor clang"):
        build("answers", "answers.c", str(tmp_path), [], [], [])
