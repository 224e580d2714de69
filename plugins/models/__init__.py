"""The default models, by the architecture that config.json states. Adding a family is one file here and one row."""

from __future__ import annotations

from frame import Provider, hookimpl

_FAMILIES = (
    ("LlamaForCausalLM", "llama:LlamaForCausalLM", "Llama 1 to 3, any rope variant"),
    ("MistralForCausalLM", "mistral:MistralForCausalLM", "Mistral, with or without a sliding window"),
    ("Qwen2ForCausalLM", "qwen2:Qwen2ForCausalLM", "Qwen2 and Qwen2.5"),
    ("Qwen3ForCausalLM", "qwen3:Qwen3ForCausalLM", "Qwen3"),
    ("Qwen3MoeForCausalLM", "qwen3_moe:Qwen3MoeForCausalLM", "Qwen3 with routed experts"),
    ("Gemma2ForCausalLM", "gemma2:Gemma2ForCausalLM", "Gemma 2"),
    ("Gemma3ForCausalLM", "gemma3:Gemma3ForCausalLM", "Gemma 3, text"),
    ("Gemma3ForConditionalGeneration", "gemma3:Gemma3ForConditionalGeneration", "Gemma 3, text part only"),
    ("Olmo2ForCausalLM", "olmo2:Olmo2ForCausalLM", "OLMo 2"),
    ("Phi3ForCausalLM", "phi3:Phi3ForCausalLM", "Phi-3 and Phi-4, text"),
    ("GPT2LMHeadModel", "gpt2:GPT2LMHeadModel", "GPT-2"),
    ("BertModel", "bert:BertModel", "BERT, for embeddings"),
    ("BertForSequenceClassification", "bert:BertForSequenceClassification", "BERT, for classes and reranking"),
    ("RobertaModel", "roberta:RobertaModel", "RoBERTa, for embeddings"),
    ("RobertaForSequenceClassification", "roberta:RobertaForSequenceClassification", "RoBERTa, for classes"),
    ("XLMRobertaModel", "roberta:RobertaModel", "XLM-RoBERTa, for embeddings"),
    (
        "XLMRobertaForSequenceClassification",
        "roberta:RobertaForSequenceClassification",
        "XLM-RoBERTa, for classes and reranking",
    ),
)


@hookimpl
def frame_models() -> list[Provider]:
    """One provider an architecture."""
    return [
        Provider(name, f"frame.plugins.models.{target}", api=">=0.2.dev1,<0.3", summary=summary)
        for name, target, summary in _FAMILIES
    ]
