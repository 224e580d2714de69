"""The page of sampling parameters, from the fields of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from tables import table

from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.schema import SamplingFields

#: What each field of SamplingParams does. Ranges are those that `SamplingParams.verify` checks.
_MEANINGS: Mapping[str, str] = {
    "n": "Outputs for the prompt, at least 1. Output i draws with a seed made of the request's seed and i.",
    "presence_penalty": "In [-2, 2]; taken off the logit of every token that was generated before.",
    "frequency_penalty": "In [-2, 2]; taken off the logit of a token once for each time that it was generated before.",
    "repetition_penalty": "In [0.0001, 10000]; above 1 makes tokens of prompt and output less likely.",
    "temperature": "In [0, 10000]; below 0.00001 the most likely token is taken, else at least 0.01 is used.",
    "top_p": "In [1e-30, 1]; keeps the most likely tokens whose probabilities reach this sum.",
    "top_k": "Keeps the k most likely tokens; 0 or -1 keeps all.",
    "min_p": "In [0, 1]; drops tokens whose probability is below this share of the largest one.",
    "seed": "A 64-bit integer: equal seeds draw equal noise whatever the batch; None or -1 takes one from the engine.",
    "stop": "Texts that end the output; not part of it unless `include_stop_str_in_output`.",
    "stop_token_ids": "Token ids that end the output, besides the end-of-sequence tokens.",
    "include_stop_str_in_output": "Leave the stop string in the text.",
    "ignore_eos": "Go on after an end-of-sequence token.",
    "max_tokens": "Most tokens of an output, at least 1; None: what the model's length leaves.",
    "min_tokens": "Tokens before which neither end-of-sequence nor stop tokens can be drawn.",
    "logprobs": "Log-probabilities of the drawn token and of the k most likely; -1: of the whole vocabulary.",
    "prompt_logprobs": "Log-probabilities of each prompt token and of the k most likely; computes the whole prompt.",
    "flat_logprobs": "Return log-probabilities as flat arrays instead of one dictionary for each token.",
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
    "deterministic": "Give the request the same bits, whatever other requests are in its batch.",
    "bad_words_token_ids": "Filled in by the engine.",
    "kept_special_token_ids": "Filled in for an output parser.",
}


def page() -> str:
    """The page as Markdown."""
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    if names != set(_MEANINGS):
        raise ValueError(f"docs/sampling_page.py must describe the fields of SamplingParams: {names ^ set(_MEANINGS)}")
    here = {*SamplingFields.model_fields, "logprobs"}
    rows = [
        (f"`{field.name}`", f"`{_field_default(field)}`", "yes" if field.name in here else "", _MEANINGS[field.name])
        for field in msgspec.structs.fields(SamplingParams)
        if field.name not in ("bad_words_token_ids", "kept_special_token_ids")
    ]
    return "\n\n".join(
        (
            "# Sampling parameters",
            "Fields of `frame.SamplingParams`, under vLLM's names. A value out of its range is a `ValueError` that "
            "names the field. The third column says whether a field may stand in the body of an HTTP request; "
            "`logprobs` has the form there that OpenAI gave it on each route.",
            table(("field", "default", "in HTTP bodies", "meaning"), rows),
        )
    )


def _field_default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    return str(getattr(value, "name", value))
