"""Pickles, which run code that the file brings when they are opened: refused, with the command that converts them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from frame.interfaces import LazyTensor, WeightLoader

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Opens pickles of plain tensors only, as transformers does by itself.
_CONVERT = (
    "import sys, transformers as t; source, target = sys.argv[1:]; "
    "t.AutoModelForCausalLM.from_pretrained(source, dtype='auto').save_pretrained(target)"
)


def refusal(folder: Path, file: str) -> str:
    """Why `file` is not read, and the command that makes safetensors of it."""
    source, target = shlex.quote(str(folder)), shlex.quote(f"{folder}-safetensors")
    return (
        f"the weights are in a pickle ({file}), which frame never opens; where you trust it, convert it with "
        f'`python -c "{_CONVERT}" {source} {target}`, and copy the files of the tokenizer'
    )


class PickleLoader(WeightLoader):
    """Reads nothing. npcache, which keeps copies of pickles as .npy files, would have to open them too."""

    def supports(self, folder: Path) -> str | None:
        found = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if self.setup.named and found:
            return refusal(folder, found[0])
        return "pickles, and npcache which is made of them, are never opened: use safetensors"

    def tensors(self) -> Iterator[LazyTensor]:
        raise ValueError(f"cannot read {self.folder}: {self.supports(self.folder)}")
