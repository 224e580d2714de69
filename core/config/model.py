"""The settings of the model: its files, lengths and chat template, and what a pooling model makes of its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_serializer

from .section import Section, setting


class ModelConfig(Section):
    """The model, and how requests become its tokens and its tokens become text."""

    model: str = setting(
        "",
        "Folder of a Hugging Face checkpoint, or the name of a model (org/model), which a model source fetches; "
        "default: demo, the model that ships with frame.",
    )
    model_plugin: str | None = setting(
        None,
        "Model plugin (PACKAGE:NAME) that serves the checkpoint, whatever its config.json says; default: the plugin "
        "named after its architecture, frame's own if several packages offer one.",
    )
    model_impl: Literal["auto", "frame", "transformers"] = setting(
        "auto",
        "Whose code computes the model: frame's own (frame), transformers' class with frame's attention and layers "
        "(transformers), or the first of these that has the architecture (auto).",
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a model that is fetched; of a folder: a subfolder, or a name under `snapshots/`.",
    )
    tokenizer: str | None = setting(
        None, "Folder of the tokenizer, or the name of a model that has it; default: the model's."
    )
    tokenizer_mode: str = setting(
        "auto", "Tokenizer plugin; auto: the one of highest preference that can read the tokenizer's files."
    )
    skip_tokenizer_init: bool = setting(False, "Load no tokenizer: prompts and outputs are token ids.")
    served_model_name: list[str] = setting(
        [], "Names by which requests may ask for the model; responses state the first one."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "auto", "Type of weights and activations; auto: the checkpoint's, or one that suits the platform."
    )
    quantization: str | None = setting(
        None,
        "Format of the weights (a quantization plugin); default: the one that the checkpoint states. Some, as fp8, "
        "quantise the weights of a checkpoint that is not quantised, while these load.",
    )
    max_model_len: int | None = setting(
        None,
        "Most tokens of prompt and output together; default: as many as the model was made for; -1: as many as fit in "
        "memory.",
        ge=-1,
    )
    hf_overrides: Mapping[str, Any] = setting(
        {}, "Values that replace those of the checkpoint's config.json, also nested ones."
    )
    generation_config: str = setting(
        "auto", "Source of default sampling values: auto (the checkpoint), frame (none) or a folder."
    )
    override_generation_config: Mapping[str, Any] = setting({}, "Values that replace those of the generation config.")
    runner: Literal["auto", "generate", "pooling"] = setting(
        "auto",
        "Whether the engine generates text or pools (embeds, classifies, scores); auto: what the checkpoint was made "
        "for.",
    )
    convert: Literal["auto", "none", "embed", "classify", "reward"] = setting(
        "auto", "What a pooling engine serves the model for; auto: what its architecture says."
    )
    max_logprobs: int = setting(
        20,
        "Most log-probabilities of a token that a request may ask for; -1: as many as the vocabulary has tokens.",
        ge=-1,
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = setting(
        "raw_logprobs",
        "Whether log-probabilities are taken before (raw) or after (processed) logits processors and penalties, and "
        "whether logits are returned in their place.",
    )
    enable_prompt_embeds: bool = setting(False, "Let requests bring embeddings in the place of tokens of their prompt.")
    logits_processors: list[Any] = setting(
        [], "Logits processors to load: plugin names, dotted paths, or classes (Python only)."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = setting(
        "auto",
        "Form in which chat templates get message content: joined text (string), parts (openai), or as sent (auto).",
    )
    chat_template: str | None = setting(
        None, "Chat template: a file or the template itself; default: the checkpoint's."
    )
    seed: int = setting(0, "Seed of the random draws of requests that give none.")
    deterministic: bool = setting(False, "Give every request the same bits, whatever other requests are in its batch.")

    @field_serializer("logits_processors", when_used="json")
    def _name_classes(self, processors: list[Any]) -> list[str]:
        """Replaces classes by their names; refuses one that another process could not import."""
        names = []
        for processor in processors:
            name = processor if isinstance(processor, str) else f"{processor.__module__}:{processor.__qualname__}"
            if name.startswith("__main__:") or "<locals>" in name:
                raise ValueError(f"logits processor {name} cannot be imported by another process; put it in a module")
            names.append(name)
        return names


class PoolerConfig(Section):
    """How pooling models make vectors; a setting that is not given follows the checkpoint."""

    pooling_type: str = setting("auto", "Pooler plugin: cls, last, mean, all or step.")
    normalize: bool | None = setting(None, "Scale embeddings to length 1.")
    dimensions: int | None = setting(
        None, "Length of embeddings, for Matryoshka models: the first numbers are kept.", ge=1
    )
    use_activation: bool | None = setting(None, "Turn the scores of classes into probabilities.")
    pooler_logit_bias: float | None = setting(
        None, "Number to subtract from the scores of classes before they become probabilities."
    )
    step_tag_id: int | None = setting(None, "Token at whose positions the step pooler takes scores.", ge=0)
    returned_token_ids: list[int] | None = setting(
        None, "Indices of the scores to return, for reward models that score the vocabulary."
    )
    enable_chunked_processing: bool = setting(
        False, "Embed a text that is longer than max_model_len in parts, and average their embeddings by length."
    )
    max_embed_len: int | None = setting(
        None, "Most tokens of a text that is embedded in parts; default: as many as a request may have.", ge=1
    )
