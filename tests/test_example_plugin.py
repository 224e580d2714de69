"""The example package, installed for real in an environment of its own, takes over every replaceable part."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import frame
from frame.testing.checkpoints import write_tokenizer
from tests.example_plugin.frame_example.checkpoint import write_checkpoint
from tests.server.running import server

SOURCE = Path(__file__).with_name("example_plugin")
PROVIDERS = {
    "platform": "example-cpu",
    "attention": "example-plain",
    "model": "ExampleForCausalLM",
    "connector": "example-memory",
    "processor": "example-avoid",
    "endpoint": "example-continue",
    "command": "example-hello",
}
SETTINGS = {
    "platform": "example-cpu",
    "attention_backend": "example-plain",
    "kv_connector": "example-memory",
    "scheduling_policy": "shortest",
    "block_size": 8,
    "max_model_len": 128,
    "enable_prefix_caching": False,
    "num_threads": 1,
}
PROMPTS = [[3 + (5 * i * (j + 1) + j) % 250 for i in range(size)] for j, size in enumerate((41, 9, 70))]
AVOIDED = list(range(100, 200))
RUN = """
import json, sys
from frame import LLM, SamplingParams
from frame_example.platform import describe

def main():
    settings, prompts, avoided = json.loads(sys.argv[1])
    llm = LLM(plugin={"example-memory": {"max_blocks": 40}}, **settings)
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args={"example_avoid": avoided}
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for _ in range(2):
        outputs = llm.generate(given, params, use_tqdm=False)
        answers.append([[list(o.outputs[0].token_ids), o.num_cached_tokens] for o in outputs])
    chosen = [*llm.collective_rpc(describe), *llm.llm_engine.core.info.attention]
    print(json.dumps([answers, chosen]))
    llm.close()

main()
"""
CHECK = """
import sys
from frame.core.cli.main import main
failed = [name for name in sys.argv[1:] if main(["plugins", "check", f"frame-example-plugin:{name}"])]
sys.exit(f"failed: {failed}" if failed else 0)
"""


class Environment:
    """A virtual environment that sees the packages of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = str(folder / "bin" / "python")
        ours = next(path for path in map(Path, sys.path) if (path / "pip").is_dir() and (path / "torch").is_dir())
        theirs = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        under_test = Path(frame.__file__).parents[1]  # which another checkout may have been installed before
        (theirs / "ours.pth").write_text(f"{under_test}\nimport site; site.addsitedir({str(ours)!r})\n")
        self.packages = theirs

    def run(self, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([self.python, *arguments], capture_output=True, text=True, timeout=170, check=False)
        assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def install(self, source: Path, scratch: Path) -> None:
        """As `pip install SOURCE`, from a copy: building leaves files beside the sources."""
        copy = scratch / source.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("first", "__pycache__"))
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", *options, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    made = Environment(tmp_path_factory.mktemp("environment"))
    scratch = tmp_path_factory.mktemp("sources")
    made.install(SOURCE, scratch)
    made.install(SOURCE / "first", scratch)
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    write_tokenizer(folder)
    return folder


def continue_plainly(folder, prompt, count, avoided=()):
    """Greedy decoding with the example model in a few lines of torch, from the file's own names."""
    weights = load_file(folder / "model.safetensors")
    ids = list(prompt)
    for _ in range(count):
        hidden = weights["words.weight"][ids]
        positions = torch.arange(len(ids))
        angles = torch.outer(positions.float(), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
        for name in ("trunk.0", "trunk.1"):
            normed = functional.rms_norm(hidden, (32,), weights[f"{name}.norm.weight"], 1e-6)
            q, k, v = (
                (normed @ weights[f"{name}.mix.{part}.weight"].T).view(len(ids), -1, 8).transpose(0, 1)
                for part in ("wq", "wk", "wv")
            )
            q, k = turn(q, angles), turn(k, angles)
            mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
            mixed = mixed[0].transpose(0, 1).flatten(1) @ weights[f"{name}.mix.wo.weight"].T
            gate, up = (normed @ weights[f"{name}.grow.{part}.weight"].T for part in ("gate", "up"))
            hidden = hidden + mixed + (functional.silu(gate) * up) @ weights[f"{name}.grow.down.weight"].T
        last = functional.rms_norm(hidden[-1], (32,), weights["last_norm.weight"], 1e-6)
        logits = weights["words.weight"] @ last
        logits[list(avoided)] = float("-inf")
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def turn(x, angles):
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def test_plugins_are_listed(environment):
    rows = json.loads(environment.run("-m", "frame", "plugins", "--json").stdout)
    mine = {row["kind"]: row for row in rows if row["package"] == "frame-example-plugin"}
    assert {kind: row["name"] for kind, row in mine.items()} == PROVIDERS
    assert {(row["version"], row["why"]) for row in mine.values()} == {("0.1.0", "")}
    usable = {"platform", "processor", "endpoint", "command"}  # the others depend on what is asked of them
    assert {kind: row["status"] for kind, row in mine.items()} == {
        kind: "usable" if kind in usable else "loaded" for kind in PROVIDERS
    }
    table = environment.run("-m", "frame", "plugins").stdout
    assert "prompt blocks in host memory" in table
    assert "frame-shortest" in table


def test_command_runs(environment):
    assert "Greets a plugin author." in environment.run("-m", "frame", "--help").stdout
    done = environment.run("-m", "frame", "example-hello", "--name", "you")
    assert done.stdout == f"hello, you: this frame has plugin API {frame.API_VERSION}\n"


def test_a_request_goes_through_every_part(environment, checkpoint):
    settings = {"model": str(checkpoint), "skip_tokenizer_init": True, **SETTINGS}
    done = environment.run("-c", RUN, json.dumps([settings, PROMPTS, AVOIDED]))
    answers, chosen = json.loads(done.stdout.splitlines()[-1])
    assert chosen == ["ExampleCpu", "example-plain"]
    expected = [continue_plainly(checkpoint, prompt, 8, AVOIDED) for prompt in PROMPTS]
    assert expected != [continue_plainly(checkpoint, prompt, 8) for prompt in PROMPTS]
    assert answers[0] == [[tokens, 0] for tokens in expected]
    # the second time, whole blocks short of the last token come from the connector
    assert answers[1] == [[tokens, (len(p) - 1) // 8 * 8] for tokens, p in zip(expected, PROMPTS, strict=True)]


def test_openai_client_is_served_through_every_part(environment, checkpoint):
    flags = [str(checkpoint), "--no-enable-prefix-caching", "--plugin.example-memory.max_blocks", "40"]
    for name, value in SETTINGS.items():
        if not isinstance(value, bool):
            flags += [f"--{name.replace('_', '-')}", str(value)]
    with (
        server(
            [environment.python, "-m", "frame", "serve", "--no-standby-engine"],
            *flags,
            "--enable-prompt-tokens-details",
        ) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        model = client.models.list().data[0].id
        cached = []
        for _ in range(2):
            answer = client.completions.create(
                model=model,
                prompt=PROMPTS[0],
                max_tokens=8,
                temperature=0,
                logprobs=0,
                extra_body={"ignore_eos": True, "vllm_xargs": {"example_avoid": AVOIDED}, "return_token_ids": True},
            )
            assert answer.choices[0].token_ids == continue_plainly(checkpoint, PROMPTS[0], 8, AVOIDED)
            details = answer.usage.prompt_tokens_details
            cached.append(details.cached_tokens if details else 0)
        assert cached == [0, 40]
        with pytest.raises(openai.BadRequestError, match="example_avoid must be a list of token ids"):
            client.completions.create(model=model, prompt="x", extra_body={"vllm_xargs": {"example_avoid": "x"}})
        check_example_route(
            running.url, client.completions.create(model=model, prompt="x", max_tokens=8, temperature=0)
        )


def check_example_route(url, expected):
    """The example's own route gives what the server's route gives, whole and as a stream; wrong bodies are refused."""
    body = {"prompt": "x", "max_tokens": 8, "temperature": 0}
    whole = httpx.post(f"{url}/example/continue", json=body).json()
    assert whole["text"] == expected.choices[0].text
    assert whole["num_tokens"] == expected.usage.completion_tokens
    assert whole["finish_reason"] == expected.choices[0].finish_reason
    events = httpx.post(f"{url}/example/continue", json={**body, "stream": True}).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(event[6:])["text"] for event in events[:-2]) == whole["text"]
    refused = httpx.post(f"{url}/example/continue", json={"prompt": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.matrix
def test_every_plugin_passes_its_contract(environment):
    environment.run("-c", CHECK, *PROVIDERS.values())


BROKEN = {
    "frame-twin": "Provider('shortest', 'frame_twin:Policy', api='>=0.2.dev1,<0.3')",
    "frame-later": "Provider('later', 'frame_later:Policy', api='>=7')",
    "frame-misspelt": "Provider('misspelt', 'frame_misspelt:Policy', api='>=0.2.dev1,<0.3')",
    "frame-crash": "Provider('crash', 'frame_crash:Policy', api='>=0.2.dev1,<0.3')",
    "frame-hollow": "Provider('hollow', 'frame_hollow_missing:Policy', api='>=0.2.dev1,<0.3')",
}
REFUSALS = {
    "shortest": (
        "scheduling policy 'shortest' is offered by 2 packages; name one of 'frame-shortest:shortest', "
        "'frame-twin:shortest'"
    ),
    "later": (
        "scheduling policy 'later' of package frame-later cannot be used: it was written for plugin API >=7, "
        f"this frame has {frame.API_VERSION}; install a version of the package made for it"
    ),
    "misspelt": "package frame-misspelt failed: no hook 'frame_shedulers' (did you mean frame_schedulers",
    "crash": "package frame-crash failed: ModuleNotFoundError: No module named 'no_such_dependency'",
    "hollow": (
        "scheduling policy 'hollow' of package frame-hollow cannot be imported from frame_hollow_missing:Policy: "
        "ModuleNotFoundError: No module named 'frame_hollow_missing'"
    ),
}


#: A processor and an endpoint that nobody names, and whose module cannot be imported here.
MOODY = {
    "frame_moody-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: frame-moody\nVersion: 1.0\n",
    "frame_moody-1.0.dist-info/entry_points.txt": "[frame]\nmain = frame_moody\n",
    "frame_moody_parts.py": "import no_such_library\n",
    "frame_moody.py": """
from frame import Provider, hookimpl
@hookimpl
def frame_logits_processors(): return [Provider("moody", "frame_moody_parts:Odd", api=">=0.2.dev1,<0.3")]
@hookimpl
def frame_endpoints(): return [Provider("moody", "frame_moody_parts:Routes", api=">=0.2.dev1,<0.3")]
""",
}


@pytest.fixture(scope="module")
def troubled(environment, tmp_path_factory):
    """The environment with five packages that are wrong in a way of their own; they are gone afterwards."""
    made = []
    for name, provider in BROKEN.items():
        module = name.replace("-", "_")
        hook = "frame_shedulers" if "misspelt" in name else "frame_schedulers"
        source = [
            "from frame import Provider, hookimpl",
            "from frame.interfaces import SchedulerPolicy",
            *(["import no_such_dependency"] if "crash" in name else []),
            "class Policy(SchedulerPolicy):",
            "    def key(self, request): return ()",
            "@hookimpl",
            f"def {hook}(): return [{provider}]",
        ]
        info = environment.packages / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[frame]\nmain = {module}\n")
        file = environment.packages / f"{module}.py"
        file.write_text("\n".join(source))
        made += [info, file]
    for file, text in MOODY.items():
        path = environment.packages / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        made.append(path)
    yield environment
    for path in made:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_broken_packages_are_reported_and_disturb_nobody(troubled):
    rows = json.loads(troubled.run("-m", "frame", "plugins", "--json").stdout)
    failed = {row["package"]: row["why"] for row in rows if row["status"] == "failed"}
    assert set(failed) == {"frame-later", "frame-misspelt", "frame-crash"}
    assert "no hook 'frame_shedulers'" in failed["frame-misspelt"]
    assert "No module named 'no_such_dependency'" in failed["frame-crash"]
    assert {row["status"] for row in rows if row["package"] == "frame-example-plugin"} == {"loaded", "usable"}
    unusable = {row["kind"]: row["why"] for row in rows if row["package"] == "frame-moody"}
    assert "No module named 'no_such_library'" in unusable["processor"]
    assert "No module named 'no_such_library'" in unusable["endpoint"]
    assert {row["name"]: row["status"] for row in rows if row["package"] == "frame-moody"} == {"moody": "unusable"}
    assert "hello" in troubled.run("-m", "frame", "example-hello").stdout


def test_what_nobody_named_is_left_out_and_the_others_serve(troubled, checkpoint):
    policy = "frame-shortest:shortest"
    settings = {"model": str(checkpoint), "skip_tokenizer_init": True, **SETTINGS, "scheduling_policy": policy}
    done = troubled.run("-c", RUN, json.dumps([settings, PROMPTS[:1], []]))
    assert "logits processor 'moody' of package frame-moody is left out: " in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0][0] == [[continue_plainly(checkpoint, PROMPTS[0], 8), 0]]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", REFUSALS)
def test_what_was_asked_for_and_is_broken_stops_the_start_with_one_sentence(troubled, checkpoint, name):
    done = troubled.run("-m", "frame", "serve", str(checkpoint), "--scheduling-policy", name, "--port", "0", fails=True)
    assert REFUSALS[name] in done.stderr
    assert "Traceback" not in done.stderr


def test_package_name_tells_twins_apart(troubled):
    code = (
        "from frame.core.plugin_host.registry import Registry; print(Registry.load().choose('scheduler', {!r}).target)"
    )
    for package in ("frame-twin", "frame-shortest"):
        target = troubled.run("-c", code.format(f"{package}:shortest")).stdout.strip()
        assert target.startswith(package.replace("-", "_"))
