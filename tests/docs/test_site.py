"""The site builds without a warning: no dead link, no anchor that is gone, no page outside the navigation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    # not --quiet: it would hide warnings from --strict, too
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "configuration" / "index.html").exists()
    assert not (tmp_path / "site" / "generate.py").exists()
    # files from outside of docs stand in their pages, and links to such files are text
    changelog, security, api = (
        (tmp_path / "site" / name / "index.html").read_text(encoding="utf-8")
        for name in ("changelog", "security", "plugins/api")
    )
    assert "<h2" in changelog
    assert "at the root of the repository" not in changelog
    assert "says how to report a vulnerability, and" not in security
    assert 'href="../../reference/plugin-interfaces/"' in api
    assert "core/interfaces, one file for each kind" in api
