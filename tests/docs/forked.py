"""Runs scripts one after the other, each in a fork of this process, which has imported the libraries that are slow.

`python forked.py`: a line on standard input is JSON, [script, folder, output]; the answer is a line, its exit status.
A script imports all of frame for itself.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

import anthropic.resources.messages
import httpx
import openai.resources.chat.completions
import openai.resources.completions
import openai.resources.responses
import torch
import transformers.tokenization_utils_tokenizers  # as tokenizers of frame do

LIBRARIES = (anthropic, httpx, openai, torch, transformers)


def serve() -> str | None:
    """Answers until standard input ends; returns a script's name in the process that is to run it."""
    for line in sys.stdin:
        script, folder, output = json.loads(line)
        child = os.fork()
        if not child:
            become(folder, output)
            return str(script)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def become(folder: str, output: str) -> None:
    """Makes this process one that was started in the folder, which prints into files."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor, name in ((1, output), (2, f"{output}.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    os.chdir(folder)


if __name__ == "__main__":
    name = serve()
    if name is not None:
        sys.argv, sys.path[0] = [name], os.getcwd()
        runpy.run_path(name, run_name="__main__")
