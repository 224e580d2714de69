"""Builds the C functions that launch Triton's kernels, one for each signature, in a third of Triton's own time.

They are not optimised: they only hand arguments to the driver, and CUDA graphs do not call them. They are kept in
Triton's cache on disk. Knows no kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from triton import knobs


def build(
    name: str,
    source: str,
    folder: str,
    library_dirs: Sequence[str],
    include_dirs: Sequence[str],
    libraries: Sequence[str],
) -> str:
    """Builds the extension module `name` of Python from the C file `source`; the file in `folder` that it is in.

    Raises RuntimeError without a compiler, `subprocess.CalledProcessError` when that fails.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler for Triton's launchers: CC is not set, and there is neither gcc nor clang")
    built = str(Path(folder, name + sysconfig.get_config_var("EXT_SUFFIX")))
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # where Debian has Python's headers
    headers = [*include_dirs, folder, sysconfig.get_paths(scheme=scheme)["include"], *knobs.build.backend_dirs]
    command = [compiler, source, "-O0", "-shared", "-fPIC", "-Wno-psabi", "-o", built]
    command += [f"-l:{one}" if one.endswith(".a") or ".so" in one else f"-l{one}" for one in libraries]
    command += [f"-L{one}" for one in library_dirs] + [f"-I{one}" for one in headers]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return built
