"""Kernels as plain data says that launches ask for them: types, constants, options. Imports no torch itself.

An entry of that data names its `kernel`, "module:function"; `arguments` maps those that are no `constants` to Triton's
types, with what it knows of one after a bar ("*bf16|D": an address that is a multiple of 16 bytes); `options` are those
that are not Triton's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any

from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime import driver
from triton.runtime.cache import get_cache_key

from .compiler import ALL_SECONDS, KERNEL_SECONDS, Compile, build_driver_functions, hash_of, leave
from .forks import Forks


def keyed(entry: dict[str, Any]) -> tuple[str, Compile]:
    """The hash of an entry's key in Triton's cache, and what compiles it, for the active driver's device.

    Raises what Python does when the kernel has no such arguments or is not there.
    """
    module, _, name = entry["kernel"].partition(":")
    kernel = getattr(import_module(module), name)
    _, _, target, backend, _ = kernel.device_caches[driver.active.get_current_device()]
    constants, types = entry["constants"], entry["arguments"]
    bound = {name: constants.get(name) for name in kernel.arg_names}
    chosen = [("constexpr", value) if name in constants else _chosen(types[name]) for name, value in bound.items()]
    options, signature, constants, attributes = kernel._pack_args(backend, entry["options"], bound, chosen, None)
    source = kernel.ASTSource(kernel, signature, constants, attributes)
    settings = get_cache_invalidating_env_vars()
    key = get_cache_key(source, backend, options, settings)
    return hash_of(key), partial(kernel.compile, source, target=target, options=vars(options), _env_vars=settings)


def _chosen(text: str) -> tuple[str, str | None]:
    """A type and what is known of it, as Triton has them."""
    type_, bar, known = text.partition("|")
    return type_, known if bar else None


def compile_all(kernels: Iterable[Compile]) -> None:
    """Compiles each in a forked process, the first ones first; raises RuntimeError when one fails.

    Beside them goes what Triton has built for the driver.
    """
    forks = Forks(seconds=KERNEL_SECONDS, all_seconds=ALL_SECONDS)
    forks.start(build_driver_functions)
    for compile_kernel in kernels:
        forks.start(partial(leave, compile_kernel))
    forks.wait()
    if forks.num_failed:
        raise RuntimeError(f"{forks.num_failed} kernels were not compiled")
