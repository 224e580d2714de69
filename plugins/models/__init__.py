"""The default models, by the architecture that config.json states. Adding a family is one file here and one row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from frame import Provider, hookimpl

_FAMILIES = (
    ("LlamaForCausalLM", "llama:LlamaForCausalLM", "Llama 1 to 3, any rope variant"),
    ("MistralForCausalLM", "mistral:MistralForCausalLM", "Mistral, with or without a sliding window"),
    ("Qwen2ForCausalLM", "qwen2:Qwen2ForCausalLM", "Qwen2 and Qwen2.5"),
    ("Qwen3ForCausalLM", "qwen3:Qwen3ForCausalLM", "Qwen3"),
    ("Qwen3MoeForCausalLM", "qwen3_moe:Qwen3MoeForCausalLM", "Qwen3 with routed experts"),
    ("Qwen2MoeForCausalLM", "qwen2_moe:Qwen2MoeForCausalLM", "Qwen2 with routed experts and a shared one"),
    (
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration",
        "Qwen3-VL with routed experts, text part only",
    ),
    ("MixtralForCausalLM", "mixtral:MixtralForCausalLM", "Mixtral"),
    ("OlmoeForCausalLM", "olmoe:OlmoeForCausalLM", "OLMoE"),
    ("FlexOlmoForCausalLM", "flex_olmo:FlexOlmoForCausalLM", "FlexOlmo"),
    ("PhiMoEForCausalLM", "phimoe:PhimoeForCausalLM", "Phi-3.5-MoE, as its checkpoints name it"),
    ("PhimoeForCausalLM", "phimoe:PhimoeForCausalLM", "Phi-3.5-MoE"),
    ("GraniteMoeForCausalLM", "granite_moe:GraniteMoeForCausalLM", "Granite 3 with routed experts"),
    ("GraniteMoeSharedForCausalLM", "granite_moe:GraniteMoeForCausalLM", "GraniteMoe with a shared expert"),
    ("Glm4MoeForCausalLM", "glm4_moe:Glm4MoeForCausalLM", "GLM-4.5 to 4.7"),
    ("SolarOpenForCausalLM", "glm4_moe:SolarOpenForCausalLM", "Solar Open"),
    ("Dots1ForCausalLM", "glm4_moe:Dots1ForCausalLM", "dots.llm1"),
    ("GptOssForCausalLM", "gpt_oss:GptOssForCausalLM", "gpt-oss"),
    ("MiniMaxM2ForCausalLM", "minimax_m2:MiniMaxM2ForCausalLM", "MiniMax-M2"),
    ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe:Ernie4_5_MoeForCausalLM", "ERNIE 4.5 with routed experts"),
    ("HunYuanMoEV1ForCausalLM", "hunyuan_moe:HunYuanMoEV1ForCausalLM", "Hunyuan-A13B"),
    ("HYV3ForCausalLM", "hunyuan_moe:HYV3ForCausalLM", "HY3"),
    ("AfmoeForCausalLM", "afmoe:AfmoeForCausalLM", "AFMoE: Trinity"),
    ("ExaoneMoeForCausalLM", "exaone_moe:ExaoneMoeForCausalLM", "K-EXAONE"),
    ("Llama4ForCausalLM", "llama4:Llama4ForCausalLM", "Llama 4, text"),
    ("Llama4ForConditionalGeneration", "llama4:Llama4ForConditionalGeneration", "Llama 4, text part only"),
    ("MiMoV2FlashForCausalLM", "mimo_v2:MiMoV2FlashForCausalLM", "MiMo-V2-Flash"),
    ("DbrxForCausalLM", "dbrx:DbrxForCausalLM", "DBRX"),
    ("MellumForCausalLM", "mellum:MellumForCausalLM", "Mellum 2"),
    ("Gemma2ForCausalLM", "gemma2:Gemma2ForCausalLM", "Gemma 2"),
    ("Gemma3ForCausalLM", "gemma3:Gemma3ForCausalLM", "Gemma 3, text"),
    ("Gemma3ForConditionalGeneration", "gemma3:Gemma3ForConditionalGeneration", "Gemma 3, text part only"),
    ("Olmo2ForCausalLM", "olmo2:Olmo2ForCausalLM", "OLMo 2"),
    ("Phi3ForCausalLM", "phi3:Phi3ForCausalLM", "Phi-3 and Phi-4, text"),
    ("GemmaForCausalLM", "gemma:GemmaForCausalLM", "Gemma 1"),
    ("Gemma3nForCausalLM", "gemma3n:Gemma3nForCausalLM", "Gemma 3n, text"),
    ("Gemma3nForConditionalGeneration", "gemma3n:Gemma3nForConditionalGeneration", "Gemma 3n, text part only"),
    ("Gemma4ForCausalLM", "gemma4:Gemma4ForCausalLM", "Gemma 4, text, without experts"),
    ("Gemma4ForConditionalGeneration", "gemma4:Gemma4ForConditionalGeneration", "Gemma 4, text part only"),
    ("VaultGemmaForCausalLM", "gemma:VaultGemmaForCausalLM", "VaultGemma"),
    ("GlmForCausalLM", "glm:GlmForCausalLM", "GLM-4-9B and GLM-Edge"),
    ("Glm4ForCausalLM", "glm:Glm4ForCausalLM", "GLM-4-0414, 9B and 32B"),
    ("GraniteForCausalLM", "granite:GraniteForCausalLM", "Granite 3, dense"),
    ("GraniteSWAForCausalLM", "granite:GraniteSWAForCausalLM", "Granite with windows and sinks"),
    ("HyperCLOVAXForCausalLM", "granite:HyperCLOVAXForCausalLM", "HyperCLOVA X SEED"),
    ("MiniCPMForCausalLM", "granite:MiniCPMForCausalLM", "MiniCPM 1 to 4, without sparse attention"),
    ("ExaoneForCausalLM", "exaone:ExaoneForCausalLM", "EXAONE 3 and 3.5"),
    ("BaichuanForCausalLM", "baichuan:BaichuanForCausalLM", "Baichuan 13B, Baichuan 2"),
    ("BaiChuanForCausalLM", "baichuan:BaichuanForCausalLM", "Baichuan 7B"),
    ("SmolLM3ForCausalLM", "llama_variants:SmolLM3ForCausalLM", "SmolLM3"),
    ("SeedOssForCausalLM", "llama_variants:SeedOssForCausalLM", "Seed-OSS"),
    ("Ernie4_5ForCausalLM", "llama_variants:Ernie4_5ForCausalLM", "ERNIE 4.5, dense"),
    ("HeliumForCausalLM", "llama_variants:HeliumForCausalLM", "Helium"),
    ("ArceeForCausalLM", "llama_variants:ArceeForCausalLM", "Arcee AFM"),
    ("MinistralForCausalLM", "llama_variants:MinistralForCausalLM", "Ministral"),
    ("Ministral3ForCausalLM", "llama_variants:Ministral3ForCausalLM", "Ministral 3, text"),
    ("CwmForCausalLM", "llama_variants:CwmForCausalLM", "CWM"),
    ("OlmoForCausalLM", "olmo:OlmoForCausalLM", "OLMo 1"),
    ("Olmo3ForCausalLM", "normed_heads:Olmo3ForCausalLM", "OLMo 3"),
    ("Exaone4ForCausalLM", "normed_heads:Exaone4ForCausalLM", "EXAONE 4"),
    ("ApertusForCausalLM", "normed_heads:ApertusForCausalLM", "Apertus"),
    ("HunYuanDenseV1ForCausalLM", "normed_heads:HunYuanDenseV1ForCausalLM", "Hunyuan, dense"),
    ("NemotronForCausalLM", "nemotron:NemotronForCausalLM", "Nemotron 3 and 4, Minitron"),
    ("Jais2ForCausalLM", "nemotron:Jais2ForCausalLM", "Jais 2"),
    ("NanoChatForCausalLM", "nanochat:NanoChatForCausalLM", "nanochat"),
    ("BitNetForCausalLM", "bitnet:BitNetForCausalLM", "BitNet b1.58 with 16-bit weights"),
    ("DeepseekV2ForCausalLM", "deepseek:DeepseekV2ForCausalLM", "DeepSeek V2 and V2-Lite"),
    ("DeepseekV3ForCausalLM", "deepseek:DeepseekV3ForCausalLM", "DeepSeek V3 and R1, Kimi K2"),
    ("KimiK2ForCausalLM", "deepseek:DeepseekV3ForCausalLM", "Kimi K2"),
    ("Glm4MoeLiteForCausalLM", "deepseek:DeepseekV3ForCausalLM", "GLM-4.7-Flash"),
    ("DeepseekV32ForCausalLM", "deepseek_sparse:DeepseekV32ForCausalLM", "DeepSeek V3.2, sparse attention"),
    ("GlmMoeDsaForCausalLM", "deepseek_sparse:GlmMoeDsaForCausalLM", "GLM-5, sparse attention"),
    ("MiniCPM3ForCausalLM", "minicpm3:MiniCPM3ForCausalLM", "MiniCPM3"),
    ("LongcatFlashForCausalLM", "longcat_flash:LongcatFlashForCausalLM", "LongCat-Flash"),
    ("Mistral4ForCausalLM", "mistral4:Mistral4ForCausalLM", "Mistral 4, text"),
    ("YoutuForCausalLM", "deepseek:YoutuForCausalLM", "Youtu-LLM"),
    ("MambaForCausalLM", "mamba:MambaForCausalLM", "Mamba"),
    ("FalconMambaForCausalLM", "mamba:FalconMambaForCausalLM", "Falcon-Mamba"),
    ("Mamba2ForCausalLM", "mamba2:Mamba2ForCausalLM", "Mamba-2"),
    ("Qwen3NextForCausalLM", "qwen3_next:Qwen3NextForCausalLM", "Qwen3-Next"),
    ("Qwen3_5ForCausalLM", "qwen3_next:Qwen3_5ForCausalLM", "Qwen3.5, text"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_next:Qwen3_5ForCausalLM", "Qwen3.5, text part only"),
    ("Qwen3_5MoeForCausalLM", "qwen3_next:Qwen3_5ForCausalLM", "Qwen3.5 with experts, text"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_next:Qwen3_5ForCausalLM", "Qwen3.5 with experts, text part only"),
    ("Lfm2ForCausalLM", "lfm2:Lfm2ForCausalLM", "LFM2"),
    ("Lfm2MoeForCausalLM", "lfm2:Lfm2MoeForCausalLM", "LFM2 with routed experts"),
    ("BambaForCausalLM", "bamba:BambaForCausalLM", "Bamba"),
    ("GraniteMoeHybridForCausalLM", "bamba:GraniteMoeHybridForCausalLM", "Granite 4"),
    ("NemotronHForCausalLM", "nemotron_h:NemotronHForCausalLM", "Nemotron-H"),
    ("FalconH1ForCausalLM", "falcon_h1:FalconH1ForCausalLM", "Falcon-H1"),
    ("JambaForCausalLM", "jamba:JambaForCausalLM", "Jamba"),
    ("Zamba2ForCausalLM", "zamba2:Zamba2ForCausalLM", "Zamba2"),
    ("MiniMaxForCausalLM", "minimax:MiniMaxForCausalLM", "MiniMax-01"),
    ("OlmoHybridForCausalLM", "olmo_hybrid:OlmoHybridForCausalLM", "OLMo Hybrid"),
    ("KimiLinearForCausalLM", "kimi_linear:KimiLinearForCausalLM", "Kimi-Linear"),
    ("OpenAIGPTLMHeadModel", "gpt2:OpenAIGPTLMHeadModel", "the first GPT"),
    ("GPT2LMHeadModel", "gpt2:GPT2LMHeadModel", "GPT-2"),
    ("GPTNeoForCausalLM", "gpt2:GPTNeoForCausalLM", "GPT-Neo"),
    ("GPTBigCodeForCausalLM", "gpt2:GPTBigCodeForCausalLM", "StarCoder, SantaCoder"),
    ("CohereForCausalLM", "cohere:CohereForCausalLM", "Cohere's Command-R and R+"),
    ("Cohere2ForCausalLM", "cohere:Cohere2ForCausalLM", "Cohere's Command-R7B and Command-A"),
    ("Starcoder2ForCausalLM", "starcoder2:Starcoder2ForCausalLM", "StarCoder 2"),
    ("StableLmForCausalLM", "stablelm:StableLmForCausalLM", "StableLM 2 and 3B"),
    ("PhiForCausalLM", "phi:PhiForCausalLM", "Phi 1, 1.5 and 2"),
    ("GPTNeoXForCausalLM", "gpt_neox:GPTNeoXForCausalLM", "GPT-NeoX, Pythia, Dolly 2"),
    ("GPTNeoXJapaneseForCausalLM", "gpt_neox:GPTNeoXJapaneseForCausalLM", "GPT-NeoX Japanese"),
    ("PersimmonForCausalLM", "gpt_neox:PersimmonForCausalLM", "Persimmon"),
    ("OPTForCausalLM", "opt:OPTForCausalLM", "OPT, Galactica"),
    ("XGLMForCausalLM", "opt:XGLMForCausalLM", "XGLM"),
    ("BioGptForCausalLM", "opt:BioGptForCausalLM", "BioGPT"),
    ("FalconForCausalLM", "falcon:FalconForCausalLM", "Falcon 1 and 2, Falcon-RW"),
    ("BloomForCausalLM", "bloom:BloomForCausalLM", "BLOOM, BLOOMZ"),
    ("MptForCausalLM", "bloom:MptForCausalLM", "MPT"),
    ("MPTForCausalLM", "bloom:MptForCausalLM", "MPT, as its files name it"),
    ("GPTJForCausalLM", "gptj:GPTJForCausalLM", "GPT-J"),
    ("CodeGenForCausalLM", "gptj:CodeGenForCausalLM", "CodeGen"),
    (
        "ModernBertDecoderForCausalLM",
        "modernbert:ModernBertDecoderForCausalLM",
        "ModernBERT's decoder (Ettin)",
    ),
    ("CTRLLMHeadModel", "ctrl:CTRLLMHeadModel", "CTRL"),
    ("BertModel", "bert:BertModel", "BERT, for embeddings"),
    ("BertForSequenceClassification", "bert:BertForSequenceClassification", "BERT, for classes and reranking"),
    ("BertForTokenClassification", "bert:BertForTokenClassification", "BERT, for classes of tokens"),
    ("DistilBertModel", "distilbert:DistilBertModel", "DistilBERT, for embeddings"),
    (
        "DistilBertForSequenceClassification",
        "distilbert:DistilBertForSequenceClassification",
        "DistilBERT, for classes and reranking",
    ),
    (
        "DistilBertForTokenClassification",
        "distilbert:DistilBertForTokenClassification",
        "DistilBERT, for classes of tokens",
    ),
    ("ElectraModel", "electra:ElectraModel", "ELECTRA, for embeddings"),
    (
        "ElectraForSequenceClassification",
        "electra:ElectraForSequenceClassification",
        "ELECTRA, for classes and reranking",
    ),
    ("ElectraForTokenClassification", "electra:ElectraForTokenClassification", "ELECTRA, for classes of tokens"),
    ("ModernBertModel", "modernbert:ModernBertModel", "ModernBERT, for embeddings"),
    (
        "ModernBertForSequenceClassification",
        "modernbert:ModernBertForSequenceClassification",
        "ModernBERT, for classes and reranking",
    ),
    (
        "ModernBertForTokenClassification",
        "modernbert:ModernBertForTokenClassification",
        "ModernBERT, for classes of tokens",
    ),
    ("RobertaForTokenClassification", "roberta:RobertaForTokenClassification", "RoBERTa, for classes of tokens"),
    ("XLMRobertaForTokenClassification", "roberta:RobertaForTokenClassification", "XLM-RoBERTa, for classes of tokens"),
    ("RobertaModel", "roberta:RobertaModel", "RoBERTa, for embeddings"),
    ("RobertaForSequenceClassification", "roberta:RobertaForSequenceClassification", "RoBERTa, for classes"),
    ("XLMRobertaModel", "roberta:RobertaModel", "XLM-RoBERTa, for embeddings"),
    (
        "XLMRobertaForSequenceClassification",
        "roberta:RobertaForSequenceClassification",
        "XLM-RoBERTa, for classes and reranking",
    ),
)

_WINDOWS_OFF = {"defaults": {"use_sliding_window": False}}
_KIMI = {"read_as": "deepseek_v3"}
_BAICHUAN = {
    "names": {"num_key_value_heads": "num_attention_heads", "max_position_embeddings": "model_max_length"},
}
#: How config.json is read where a family's differs: what `frame_models` takes as the tag "config".
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{f"{name}ForCausalLM": {"plain_rope": True} for name in ("Llama", "Mistral", "Mixtral", "Qwen2Moe", "Gemma2")},
    **{f"{name}ForCausalLM": {"plain_rope": True, **_WINDOWS_OFF} for name in ("Qwen2", "Qwen3", "Qwen3Moe")},
    "DeepseekV3ForCausalLM": _KIMI,
    "KimiK2ForCausalLM": _KIMI,
    "MiniCPMForCausalLM": {"defaults": {"tie_word_embeddings": True}},
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
    "ExaoneForCausalLM": {
        "names": {
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        }
    },
}

#: Models of any architecture that transformers has a class for; the first that supports it is taken.
_WRAPPED = (
    ("*", "decoder:WrappedDecoder", "any class of transformers that generates, over frame's cache"),
    ("*encoder", "encoder:WrappedEncoder", "any class of transformers that embeds, as BERT does"),
    ("*classifier", "encoder:WrappedClassifier", "any class of transformers that scores texts, as BERT does"),
    (
        "*recomputed",
        "recomputed:RecomputedDecoder",
        "any other that generates, each request computed anew in each step",
    ),
)


@hookimpl
def frame_models() -> list[Provider]:
    """One provider an architecture."""
    native = [
        Provider(
            name,
            f"frame.plugins.models.{target}",
            api=">=0.2.dev1,<0.3",
            summary=summary,
            tags={"config": json.dumps(_CONFIGS[name])} if name in _CONFIGS else {},
        )
        for name, target, summary in _FAMILIES
    ]
    wrapped = [
        Provider(
            name, f"frame.plugins.models.wrapped.{target}", api=">=0.2.dev39,<0.3", summary=summary, preference=-rank
        )
        for rank, (name, target, summary) in enumerate(_WRAPPED, 1)
    ]
    return native + wrapped
