"""What share of the offline rate a server streams: the same requests through `LLM`, then through `frame serve`.

    python -m benchmarks.server_share --shape llama-8b                               # 256 streams, one API process
    python -m benchmarks.server_share --shape qwen3-0.6b --api-server-count 4
    python -m benchmarks.server_share --streams 8 --tokens-in 16 --tokens-out 32     # the demo model, on this machine

Random weights, made-up tokens, token ids in, text out, every token asked for is made. Both make text of what they draw,
one by one after each other on the same device; of each the best of `--rounds` rounds counts, after one that warms up.
A round lasts from the first request to the end of the last answer, as `--clients` processes see it, each of which reads
its part of the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import offline_gpu, speed_client, structured
from benchmarks.soak_server import SoakServer

#: Until all client processes have been started.
_LEAD_SECONDS = 1.5


class Round:
    """The streams of one client process; stands for `speed_client.Client`, which takes CPU seconds too."""

    measuring = False

    def __init__(self, num_streams: int) -> None:
        self._left = num_streams
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def begun(self) -> None:
        """A stream has its first token."""

    def ended(self) -> None:
        """A stream has ended; the round ends with the last one."""
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(time.perf_counter())

    def failed(self, error: str) -> None:
        """The round is worth nothing."""
        if not self.done.done():
            self.done.set_exception(RuntimeError(error))


def prompts(vocabulary: int, streams: int, length: int, seed: int) -> list[list[int]]:
    """Token ids of each request."""
    draw = random.Random(seed)
    return [[draw.randrange(100, vocabulary - 100) for _ in range(length)] for _ in range(streams)]


async def read_streams(url: str, bodies: list[dict[str, Any]], begin: float) -> dict[str, float]:
    """Asks for all bodies at `begin` and reads the streams; when the last one ended, and how many tokens came."""
    place = urlsplit(url)
    loop = asyncio.get_running_loop()
    round_ = Round(len(bodies))
    requests = []
    for body in bodies:
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        requests.append(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    streams = [speed_client.Stream(request, round_) for request in requests]  # type: ignore[arg-type]
    await asyncio.sleep(begin - time.perf_counter())
    opened = [loop.create_connection(lambda s=one: s, place.hostname, place.port) for one in streams]  # type: ignore[misc]
    pairs = await asyncio.gather(*opened)
    try:
        end = await round_.done
    finally:
        for transport, _ in pairs:
            transport.abort()
    return {"end": end, "tokens": sum(stream.num_tokens for stream in streams)}


def client(arguments: list[str]) -> None:
    """One client process: the file of bodies, the server and the time to begin; prints a JSON line."""
    bodies, url, begin = arguments
    print(json.dumps(asyncio.run(read_streams(url, json.loads(Path(bodies).read_text()), float(begin)))))


def serve_rounds(options: argparse.Namespace, folder: Path | None, vocabulary: int) -> list[float]:
    """Tokens a second of each round through a server."""
    shape = [] if folder is None else [str(folder), "--load-format", "dummy", "--dtype", "bfloat16"]
    flags = ["--max-model-len", str(_length(options)), "--no-enable-prefix-caching", "--max-num-seqs"]
    counts = [str(options.streams), "--api-server-count", str(options.api_server_count)]
    server = SoakServer([*shape, *flags, *counts])
    try:
        rates = [_serve(server.url, options, vocabulary, seed) for seed in range(1 + options.rounds)]
        server.stop()
    finally:
        server.close()
    return rates[1:]


def _serve(url: str, options: argparse.Namespace, vocabulary: int, seed: int) -> float:
    made = {"max_tokens": options.tokens_out, "temperature": 0.6, "ignore_eos": True}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    ids = prompts(vocabulary, options.streams, options.tokens_in, seed)
    bodies = [{"prompt": prompt, **made, **more} for prompt in ids]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter() + _LEAD_SECONDS  # the same clock in all processes
        processes = []
        for number in range(options.clients):
            part = Path(folder, f"{number}.json")
            part.write_text(json.dumps(bodies[number :: options.clients]))
            command = [sys.executable, "-m", "benchmarks.server_share", "client", str(part), url, repr(begin)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        try:
            answers = [json.loads(process.communicate(timeout=600)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
    _require(sum(answer["tokens"] for answer in answers), options)
    return options.streams * options.tokens_out / (max(answer["end"] for answer in answers) - begin)


def offline_rounds(options: argparse.Namespace, folder: Path | None, vocabulary: int) -> list[float]:
    """Tokens a second of each round through `LLM`."""
    from frame import LLM, SamplingParams

    shape = {} if folder is None else {"model": str(folder), "load_format": "dummy", "dtype": "bfloat16"}
    sizes = {"max_model_len": _length(options), "max_num_seqs": options.streams}
    llm = LLM(**shape, **sizes, enable_prefix_caching=False)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=options.tokens_out, temperature=0.6, ignore_eos=True)
    rates = []
    for seed in range(1 + options.rounds):
        ids = prompts(vocabulary, options.streams, options.tokens_in, seed)
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        _require(sum(len(output.outputs[0].token_ids) for output in outputs), options)
        rates.append(options.streams * options.tokens_out / seconds)
    llm.close()
    return rates[1:]


def _length(options: argparse.Namespace) -> int:
    return int(options.tokens_in + options.tokens_out + 16)


def _require(tokens: int, options: argparse.Namespace) -> None:
    if tokens != options.streams * options.tokens_out:
        raise RuntimeError(f"{tokens} tokens came, {options.streams * options.tokens_out} were asked for")


def write_model(shape: str, folder: Path) -> int:
    """A configuration and a tokenizer; the number of its tokens."""
    config = offline_gpu.MODELS[shape][0]
    vocabulary = int(config["vocab_size"])
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": vocabulary - 1}))
    structured.write_tokenizer(folder, vocabulary)
    return vocabulary


def main() -> None:
    """Both, and their ratio, as a JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(offline_gpu.MODELS), help="default: the demo model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens-in", type=int, default=128)
    parser.add_argument("--tokens-out", type=int, default=512)
    parser.add_argument("--api-server-count", type=int, default=1, help="API processes")
    parser.add_argument("--clients", type=int, default=4, help="processes that read streams")
    parser.add_argument("--rounds", type=int, default=2, help="after the one that warms up")
    parser.add_argument("--offline-only", action="store_true", help="Prints the rates of the rounds offline.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = None if options.shape is None else Path(place)
        vocabulary = 900 if folder is None else write_model(options.shape, folder)
        if options.offline_only:
            print(json.dumps(offline_rounds(options, folder, vocabulary)))
            return
        command = [sys.executable, "-m", "benchmarks.server_share", *sys.argv[1:], "--offline-only"]
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # a device of its own again afterwards
        offline = json.loads(out.stdout.splitlines()[-1])
        served = serve_rounds(options, folder, vocabulary)
    report = {"offline": [round(rate) for rate in offline], "served": [round(rate) for rate in served]}
    print(json.dumps({**report, "share": round(max(served) / max(offline), 3), **vars(options)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        client(sys.argv[2:])
    else:
        main()
