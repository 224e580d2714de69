"""Mends Triton 3.6's interpreter for the tests: numpy 2.4 beside it, 8-bit floats, and its slowness.

Numpy no longer turns an array of one element into an index, and warns of what overflows, which a device does not. The
interpreter rounds 8-bit floats wrongly where the rounding reaches the exponent, and cuts float8_e5m2 off. It replaces
the language's functions by its own at every call of every function, which takes half of its time; here they are
replaced once, for the life of the process.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    np.seterr(over="ignore", invalid="ignore")
    _patch = interpreter._patch_lang_tensor
    _patch_lang = interpreter._patch_lang
    _dtype = interpreter._get_np_dtype
    _convert = interpreter._convert_float
    _EIGHTS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def _patch_with_index(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _convert_by_torch(data, source, target, rounding):
        """The bits of `data` as the type `target`."""
        data = np.ascontiguousarray(data)
        if target in _EIGHTS and source == tl.float32:
            return torch.from_numpy(data.view(np.float32)).to(_EIGHTS[target]).view(torch.uint8).numpy()
        if source in _EIGHTS and target in (tl.float32, tl.float16):
            wide = torch.from_numpy(data).view(_EIGHTS[source])
            return wide.to(torch.float32 if target == tl.float32 else torch.float16).numpy()
        return _convert(data, source, target, rounding)

    _patched = set()
    _dtypes = {}

    def _patch_lang_once(function):
        """What the caller restores is empty: all kernels of this process are interpreted."""
        if function not in _patched:
            _patch_lang(function)
            _patched.add(function)
        return interpreter._LangPatchScope()

    def _known_dtype(kind):
        """As the interpreter's, which makes its whole table at every call."""
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(element, tl.pointer_type):
            return _dtype(element)
        if element not in _dtypes:
            _dtypes[element] = _dtype(element)
        return _dtypes[element]

    interpreter._get_np_dtype = _known_dtype
    interpreter._patch_lang = _patch_lang_once
    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._convert_float = _convert_by_torch
