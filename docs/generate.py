"""Writes docs/reference from the code: settings, commands, sampling parameters, models, vLLM's arguments.

`python docs/generate.py` writes the pages; `pages()` returns them, so that a test can compare. Imports no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import annotated_types
import included
import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from frame.core.config.flag_parser import FlagParser
from frame.core.config.flat import from_flat
from frame.core.config.leaves import Leaf, leaves, sections
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.provider import Provider
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.schema import SamplingFields
from frame.core.interfaces.setup import Setup
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import endpoint_setup
from frame.core.server.app import build_routes
from frame.testing.fake_serving import FakeServing
from frame.vllm_names.arguments import SHORT_FLAGS, TRANSLATIONS, VALUES
from frame.vllm_names.unused import UNUSED, Unused

FOLDER = Path(__file__).parent / "reference"
_OURS = "frame-llm"
_MADE = "<!-- Made by docs/generate.py; change the code, not this page. -->\n"

#: What each field of SamplingParams does. Ranges are those that `SamplingParams.verify` checks.
_SAMPLING: Mapping[str, str] = {
    "n": "Outputs for the prompt, at least 1. Output i draws with a seed made of the request's seed and i.",
    "presence_penalty": "In [-2, 2]; taken off the logit of every token that was generated before.",
    "frequency_penalty": "In [-2, 2]; the same, times how often it was generated.",
    "repetition_penalty": "In [0.0001, 10000]; above 1 makes tokens of prompt and output less likely.",
    "temperature": "In [0, 10000]; below 0.00001 the most likely token is taken, else at least 0.01 is used.",
    "top_p": "In [1e-30, 1]; keeps the most likely tokens whose probabilities reach this sum.",
    "top_k": "Keeps the k most likely tokens; 0 or -1 keeps all.",
    "min_p": "In [0, 1]; drops tokens less likely than this share of the most likely one.",
    "seed": "A 64-bit integer: equal seeds draw equal noise whatever the batch; None or -1 takes one from the engine.",
    "stop": "Texts that end the output; not part of it unless `include_stop_str_in_output`.",
    "stop_token_ids": "Token ids that end the output, besides the end-of-sequence tokens.",
    "include_stop_str_in_output": "Leave the stop string in the text.",
    "ignore_eos": "Go on after an end-of-sequence token.",
    "max_tokens": "Most tokens of an output, at least 1; None: what the model's length leaves.",
    "min_tokens": "Tokens before which neither end-of-sequence nor stop tokens can be drawn.",
    "logprobs": "Log-probabilities of the drawn token and of the k most likely; -1: of the whole vocabulary.",
    "prompt_logprobs": "The same for each token of the prompt; such a prompt is computed in full.",
    "flat_logprobs": "Return log-probabilities as flat arrays instead of a dictionary a token.",
    "detokenize": "Produce text; False returns ids only and excludes `stop`.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens in the text.",
    "logits_processors": "Callables `(output_ids, logits)` or `(prompt_ids, output_ids, logits)`; `LLM` only.",
    "truncate_prompt_tokens": "Keep only this many of the prompt's last tokens; -1: as many as the model takes.",
    "output_kind": "CUMULATIVE, DELTA or FINAL_ONLY: what each streamed output holds.",
    "structured_outputs": "What the text must be: a JSON schema, pattern, choice, grammar or structural tag.",
    "logit_bias": "Token id → value in [-100, 100] that is added to its logit.",
    "allowed_token_ids": "The only token ids that may be drawn.",
    "bad_words": "Words that may not be generated.",
    "extra_args": "Values for logits processors.",
    "skip_clone": "The caller promises not to change the object while the request runs.",
    "deterministic": "The same bits whatever the request is batched with.",
    "bad_words_token_ids": "Filled in by the engine.",
    "kept_special_token_ids": "Filled in for an output parser.",
}

#: What vLLM's arguments of another name are here.
_TRANSLATED: Mapping[str, str] = {
    "distributed_executor_backend": "`executor`: `uni` is `inline`, `mp` is `process`",
    "kv_transfer_config": "`kv_connector`, `kv_role`, `kv_load_failure_policy`; "
    "`kv_connector_extra_config` is `plugin.CONNECTOR`",
    "attention_config": "`attention_backend` (its key `backend`)",
    "speculative_config": "`speculator` (its key `method`), `num_speculative_tokens`, `disable_by_batch_size`; "
    "other keys are `plugin.METHOD`",
    "profiler_config": "`profile_dir` (its key `torch_profiler_dir`)",
    "structured_outputs_config": "`structured_outputs_backend` (its key `backend`), and its other keys by name",
    "guided_decoding_backend": "`structured_outputs_backend`",
    "pooler_config": "`pooling_type`, `normalize`, …: the settings under `pooler`; `logit_bias` is `pooler_logit_bias`",
    "task": "`runner` and `convert`: `embed` is `runner=pooling`, `convert=embed`",
    "device": "`platform`",
    "disable_uvicorn_access_log": "`disable_access_log`",
    "disable_fastapi_docs": "`openapi`, the opposite",
    "h11_max_incomplete_event_size": "`max_head_bytes`",
    "h11_max_header_count": "`max_headers`",
    "enable_log_requests": "`metrics_sinks` with `log`",
    "enable_log_outputs": "`plugin.log.outputs`",
    "max_log_len": "`plugin.log.max_chars`",
    "otlp_traces_endpoint": "`metrics_sinks` with `otel`, and `plugin.otel.endpoint`",
    "spec_method": "`speculator`",
    "spec_tokens": "`num_speculative_tokens`",
    "spec_model": "`speculator` where it is `ngram`; refused otherwise",
    "optimization_level": "0 is `enforce_eager`; 1 to 3 are the default here",
    "compilation_config": "`enforce_eager` (its `mode` or `cudagraph_mode`), `plugin.cuda.graph_sizes` (its "
    "`cudagraph_capture_sizes`, `max_cudagraph_capture_size`); keys of the compiler change nothing",
    "cudagraph_capture_sizes": "`plugin.cuda.graph_sizes`",
    "cuda_graph_sizes": "`plugin.cuda.graph_sizes`",
    "max_cudagraph_capture_size": "`plugin.cuda.graph_sizes`, the default ones up to it; 0 is `enforce_eager`",
    "disable_cascade_attn": "`shared_prefix_min_tokens=0`",
    "shutdown_timeout": "`drain_seconds`",
}


def pages() -> dict[str, str]:
    """File name in docs/reference → its content."""
    made = {
        "configuration.md": _configuration(),
        "cli.md": _command_line(),
        "sampling.md": _sampling(),
        "architectures.md": _architectures(),
        "vllm-arguments.md": _vllm_arguments(),
        "api.md": _api(),
    }
    return {name: _MADE + "\n" + text.rstrip() + "\n" for name, text in made.items()}


def _configuration() -> str:
    parts = [
        "# Settings",
        "Every setting has one name: `--max-model-len` on the command line, `max_model_len` in a YAML file, in "
        "`LLM(max_model_len=…)` and in `EngineArgs`. The command line beats the file, the file beats the default. "
        "Whole numbers may be written `4k` (4000) or `4K` (4096). A switch that is on is turned off by `--no-NAME`. "
        "`--hf-overrides.a.b 1` sets one key of a mapping.",
    ]
    for section, about in sections().items():
        fields = _section_fields(section)
        rows = [
            (f"`{own.name}`", _values(own, fields[own.name]), _default(own.default), own.help)
            for own in leaves().values()
            if own.section == section
        ]
        parts += [f"## {section}", about, _table(("setting", "values", "default", "meaning"), rows)]
    parts += [
        "## plugin",
        "Settings of plugins: `--plugin.NAME.FIELD VALUE`, or `plugin: {NAME: {FIELD: VALUE}}` in the file and in "
        "Python.",
    ]
    for provider in _ours(None):
        if provider.options is not None:
            parts.append(_option_table(provider))
    return "\n\n".join(parts)


def _section_fields(section: str) -> Mapping[str, FieldInfo]:
    kind = FrameConfig.model_fields[section].annotation
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        raise TypeError(f"section {section!r} is no model")
    return kind.model_fields


def _option_table(provider: Provider) -> str:
    options = provider.options
    if isinstance(options, str):
        module, _, name = options.partition(":")
        options = getattr(import_module(module), name)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise TypeError(f"options of {provider.name!r} are no pydantic model: {provider.options!r}")
    rows = [
        (
            f"`plugin.{provider.name}.{name}`",
            _bounds(field),
            "needed" if field.is_required() else _default(field.get_default(call_default_factory=True)),
            field.description or "",
        )
        for name, field in options.model_fields.items()
    ]
    return _table(("setting", "values", "default", "meaning"), rows)


def _values(own: Leaf, field: FieldInfo) -> str:
    if own.choices:
        return ", ".join(f"`{choice}`" for choice in own.choices)
    words = {"bool": "switch", "int": "integer", "float": "number", "mapping": "JSON object"}
    return f"{words.get(own.kind, own.kind)} {_bounds(field)}".strip()


def _bounds(field: FieldInfo) -> str:
    signs = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}
    found = []
    for bound in field.metadata:
        for kind, sign in signs.items():
            if isinstance(bound, kind):
                found.append(f"{sign} {getattr(bound, kind.__name__.lower())}")
    return ", ".join(found)


def _default(value: Any) -> str:
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def _command_line() -> str:
    parts = ["# Commands"]
    targets = {"serve": "frame.core.cli.serve:ServeCommand"}
    targets |= {provider.name: provider.target for provider in _ours("command")}
    for name, target in targets.items():
        module, _, kind = target.partition(":")
        command = getattr(import_module(module), kind)(Setup())
        parser = FlagParser(prog=f"frame {name}", description=command.help)
        command.add_arguments(parser)
        parts += [f"## frame {name}", command.help]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for part, own in action.choices.items():
                    parts += [f"### frame {name} {part}", own.description, _arguments(own)]
                break
        else:
            parts.append(_arguments(parser))
        if name == "serve":
            parts.append(
                "All [settings](configuration.md) are flags; `--help=GROUP`, `--help=FLAG` and `--help=all` show them. "
                f"Short forms: {', '.join(f'`{flag}` is `--{long}`' for flag, long in _short_flags())}."
            )
    return "\n\n".join(parts)


def _arguments(parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    return _table(("argument", "meaning"), [(_spelling(action), _meaning(action)) for action in actions])


def _short_flags() -> list[tuple[str, str]]:
    return [(flag, name.replace("_", "-")) for flag, name in SHORT_FLAGS.items()]


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`[{value}]`" if action.nargs == "?" else f"`{value}`"
    return f"`{', '.join(action.option_strings)} {value}`".replace(" `", "`")


def _meaning(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", str(action.default))


def _sampling() -> str:
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    if names != set(_SAMPLING):
        raise ValueError(f"docs/generate.py must describe the fields of SamplingParams: {names ^ set(_SAMPLING)}")
    here = {*SamplingFields.model_fields, "logprobs"}
    rows = [
        (f"`{field.name}`", f"`{_field_default(field)}`", "yes" if field.name in here else "", _SAMPLING[field.name])
        for field in msgspec.structs.fields(SamplingParams)
        if field.name not in ("bad_words_token_ids", "kept_special_token_ids")
    ]
    return "\n\n".join(
        (
            "# Sampling parameters",
            "Fields of `frame.SamplingParams`, under vLLM's names. A value out of its range is a `ValueError` that "
            "names the field. The third column says whether a field may stand in the body of an HTTP request; "
            "`logprobs` has the form there that OpenAI gave it on each route.",
            _table(("field", "default", "in HTTP bodies", "meaning"), rows),
        )
    )


def _field_default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    return str(getattr(value, "name", value))


def _architectures() -> str:
    rows = [(f"`{provider.name}`", provider.summary) for provider in _ours("model")]
    return "\n\n".join(
        (
            "# Architectures",
            "The names that `architectures` in config.json may hold; packages add more.",
            _table(("architecture", "family"), rows),
        )
    )


def _vllm_arguments() -> str:
    renamed = [(f"`{name}`", _TRANSLATED[name]) for name in TRANSLATIONS]
    values = [(f"`{name}={value}`", f"`{name}={ours}`") for (name, value), ours in VALUES.items()]
    unused = [(f"`{name}`", _accepted(one), one.reason) for name, one in sorted(UNUSED.items())]
    return "\n\n".join(
        (
            "# vLLM's arguments",
            "As flags of `frame serve` and as keywords of `LLM`, `EngineArgs` and `AsyncEngineArgs`. Names that are "
            "not here and not among the [settings](configuration.md) are errors that name the near ones.",
            "## Other names",
            _table(("vLLM's name", "here"), renamed),
            "## Other values",
            _table(("vLLM's value", "here"), values),
            "## Without a part to act on",
            "Accepted with the values in the second column; any other value is refused with the reason. `any` values "
            "are accepted, and a warning says that they have no effect.",
            _table(("argument", "accepted", "reason"), unused),
        )
    )


def _api() -> str:
    """The routes of this distribution, from the OpenAPI document that its server gives."""
    config, serving = from_flat({}), FakeServing()
    registry = Registry.load()
    setup = endpoint_setup(config, serving)
    endpoints = [registry.make("endpoint", provider.name, setup, config) for provider in _ours("endpoint")]
    document = build_routes([endpoint.router() for endpoint in endpoints]).openapi()
    parts = [
        "# API",
        "Every route of a server, from the document that it gives at `/openapi.json`. Packages add more. Fields that "
        "are not listed are ignored, or refused with `--strict-fields`; [Serving](../serving.md) says what they mean.",
    ]
    seen: dict[str, str] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"{method.upper()} {path}"
            parts.append(f"## {title}")
            if operation.get("description"):
                parts.append(operation["description"])
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if schema is None:
                continue
            name = schema.get("title", title)
            if name in seen:
                parts.append(f"Takes the body of {seen[name]}.")
                continue
            seen[name] = title
            parts += [schema.get("description", "").split("\n\n")[0], _fields_table(schema)]
    schemas = document.get("components", {}).get("schemas", {})
    parts.append("## Parts of bodies")
    for name, schema in sorted(schemas.items()):
        if schema.get("properties") and not name.endswith("ValidationError"):
            parts += [f"### {name}", schema.get("description", "").split("\n\n")[0], _fields_table(schema)]
    return "\n\n".join(filter(None, parts))


def _fields_table(schema: Mapping[str, Any]) -> str:
    needed = set(schema.get("required", ()))
    rows = [
        (f"`{name}`", _type(field), "needed" if name in needed else _default(field.get("default")))
        for name, field in schema.get("properties", {}).items()
    ]
    return _table(("field", "values", "default"), rows)


def _type(field: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name.rpartition('.')[2]}](#{name.lower().replace('.', '')})"
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_type(one) for one in field[key] if one.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        most = f", at most {field['maxItems']:,}" if "maxItems" in field else ""
        return f"list of {_type(field.get('items', {}))}{most}"
    words = {"integer": "integer", "number": "number", "boolean": "`true` or `false`", "string": "text"}
    kind = words.get(str(field.get("type")), str(field.get("type", "anything")))
    limits = [
        f"{sign} {field[key]:,}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field and abs(field[key]) < 2**31 - 1
    ]
    if "maxLength" in field:
        limits.append(f"at most {field['maxLength']:,} characters")
    return " ".join([kind, ", ".join(limits)]).strip()


def _accepted(one: Unused) -> str:
    if one.harmless is None:
        return "any"
    return ", ".join(f"`{value!r}`" for value in one.harmless)


def _ours(kind: str | None) -> list[Provider]:
    """Providers of this distribution, whatever else is installed."""
    offers = [offer for offer in Registry.load().offers if offer.package == _OURS and kind in (None, offer.kind)]
    return [offer.provider for offer in offers]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    """Writes every page, and the code of tested files into pages that show it."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for name, text in included.pages().items():
        (FOLDER.parent / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
