"""The default models, by the architecture that config.json states. Adding a family is one file here and one row."""

from __future__ import annotations

from frame import Provider, hookimpl

_FAMILIES = (
    ("LlamaForCausalLM", "llama:LlamaForCausalLM", "Llama 1 to 3, any rope variant"),
    ("MistralForCausalLM", "mistral:MistralForCausalLM", "Mistral, with or without a sliding window"),
    ("Qwen2ForCausalLM", "qwen2:Qwen2ForCausalLM", "Qwen2 and Qwen2.5"),
    ("Qwen3ForCausalLM", "qwen3:Qwen3ForCausalLM", "Qwen3"),
    ("Qwen3MoeForCausalLM", "qwen3_moe:Qwen3MoeForCausalLM", "Qwen3 with routed experts"),
    ("Qwen2MoeForCausalLM", "qwen2_moe:Qwen2MoeForCausalLM", "Qwen2 with routed experts and a shared one"),
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
    ("MellumForCausalLM", "mellum:MellumForCausalLM", "Mellum 2"),
    ("Gemma2ForCausalLM", "gemma2:Gemma2ForCausalLM", "Gemma 2"),
    ("Gemma3ForCausalLM", "gemma3:Gemma3ForCausalLM", "Gemma 3, text"),
    ("Gemma3ForConditionalGeneration", "gemma3:Gemma3ForConditionalGeneration", "Gemma 3, text part only"),
    ("Olmo2ForCausalLM", "olmo2:Olmo2ForCausalLM", "OLMo 2"),
    ("Phi3ForCausalLM", "phi3:Phi3ForCausalLM", "Phi-3 and Phi-4, text"),
    ("GemmaForCausalLM", "gemma:GemmaForCausalLM", "Gemma 1"),
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
    ("YoutuForCausalLM", "deepseek:YoutuForCausalLM", "Youtu-LLM"),
    ("GPT2LMHeadModel", "gpt2:GPT2LMHeadModel", "GPT-2"),
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
        Provider(name, f"frame.plugins.models.{target}", api=">=0.2.dev1,<0.3", summary=summary)
        for name, target, summary in _FAMILIES
    ]
    wrapped = [
        Provider(
            name, f"frame.plugins.models.wrapped.{target}", api=">=0.2.dev39,<0.3", summary=summary, preference=-rank
        )
        for rank, (name, target, summary) in enumerate(_WRAPPED, 1)
    ]
    return native + wrapped
