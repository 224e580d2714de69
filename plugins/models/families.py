"""The table of families: each architecture that config.json may state, its file here, and what it is. One line each.

A row is architecture → (file, or file:Class where the class has another name; what `frame plugins` says of it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Rows = Mapping[str, tuple[str, str]]

#: Dense decoders, most of them Llama but for traits that `dense.py` tells as data.
DECODERS: Rows = {
    "LlamaForCausalLM": ("llama", "Llama 1 to 3, any rope variant"),
    "MistralForCausalLM": ("mistral", "Mistral, with or without a sliding window"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2 and Qwen2.5"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "Qwen2VLForConditionalGeneration": ("text_parts", "Qwen2-VL, text part only"),
    "Qwen2_5_VLForConditionalGeneration": (
        "text_parts:Qwen2VLForConditionalGeneration",
        "Qwen2.5-VL, text part only",
    ),
    "Qwen3VLForConditionalGeneration": ("text_parts", "Qwen3-VL, text part only"),
    "Glm4vForConditionalGeneration": ("text_parts", "GLM-4.1V, text part only"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma 2"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma 3, text"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma 3, text part only"),
    "Olmo2ForCausalLM": ("olmo2", "OLMo 2"),
    "Phi3ForCausalLM": ("phi3", "Phi-3 and Phi-4, text"),
    "GemmaForCausalLM": ("gemma", "Gemma 1"),
    "Gemma3nForCausalLM": ("gemma3n", "Gemma 3n, text"),
    "Gemma3nForConditionalGeneration": ("gemma3n", "Gemma 3n, text part only"),
    "Gemma4ForCausalLM": ("gemma4", "Gemma 4, text"),
    "Gemma4ForConditionalGeneration": ("gemma4", "Gemma 4, text part only"),
    "VaultGemmaForCausalLM": ("gemma", "VaultGemma"),
    "GlmForCausalLM": ("glm", "GLM-4-9B and GLM-Edge"),
    "Glm4ForCausalLM": ("glm", "GLM-4-0414, 9B and 32B"),
    "GraniteForCausalLM": ("granite", "Granite 3, dense"),
    "GraniteSWAForCausalLM": ("granite", "Granite with windows and sinks"),
    "HyperCLOVAXForCausalLM": ("granite", "HyperCLOVA X SEED"),
    "MiniCPMForCausalLM": ("granite", "MiniCPM 1 to 4, without sparse attention"),
    "ExaoneForCausalLM": ("exaone", "EXAONE 3 and 3.5"),
    "BaichuanForCausalLM": ("baichuan", "Baichuan 13B, Baichuan 2"),
    "BaiChuanForCausalLM": ("baichuan:BaichuanForCausalLM", "Baichuan 7B"),
    "SmolLM3ForCausalLM": ("llama_variants", "SmolLM3"),
    "SeedOssForCausalLM": ("llama_variants", "Seed-OSS"),
    "Ernie4_5ForCausalLM": ("llama_variants", "ERNIE 4.5, dense"),
    "HeliumForCausalLM": ("llama_variants", "Helium"),
    "ArceeForCausalLM": ("llama_variants", "Arcee AFM"),
    "MinistralForCausalLM": ("llama_variants", "Ministral"),
    "Ministral3ForCausalLM": ("llama_variants", "Ministral 3, text"),
    "CwmForCausalLM": ("llama_variants", "CWM"),
    "OlmoForCausalLM": ("olmo", "OLMo 1"),
    "Olmo3ForCausalLM": ("normed_heads", "OLMo 3"),
    "Exaone4ForCausalLM": ("normed_heads", "EXAONE 4"),
    "ApertusForCausalLM": ("normed_heads", "Apertus"),
    "HunYuanDenseV1ForCausalLM": ("normed_heads", "Hunyuan, dense"),
    "NemotronForCausalLM": ("nemotron", "Nemotron 3 and 4, Minitron"),
    "Jais2ForCausalLM": ("nemotron", "Jais 2"),
    "NanoChatForCausalLM": ("nanochat", "nanochat"),
    "BitNetForCausalLM": ("bitnet", "BitNet b1.58 with 16-bit weights"),
}

#: Dense decoders with LayerNorm: parts in parallel, added positions, ALiBi, joined queries, keys and values.
OLDER: Rows = {
    "OpenAIGPTLMHeadModel": ("gpt2", "the first GPT"),
    "GPT2LMHeadModel": ("gpt2", "GPT-2"),
    "GPTNeoForCausalLM": ("gpt2", "GPT-Neo"),
    "GPTBigCodeForCausalLM": ("gpt2", "StarCoder, SantaCoder"),
    "CohereForCausalLM": ("cohere", "Cohere's Command-R and R+"),
    "Cohere2ForCausalLM": ("cohere", "Cohere's Command-R7B and Command-A"),
    "Starcoder2ForCausalLM": ("starcoder2", "StarCoder 2"),
    "StableLmForCausalLM": ("stablelm", "StableLM 2 and 3B"),
    "PhiForCausalLM": ("phi", "Phi 1, 1.5 and 2"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GPT-NeoX, Pythia, Dolly 2"),
    "GPTNeoXJapaneseForCausalLM": ("gpt_neox", "GPT-NeoX Japanese"),
    "PersimmonForCausalLM": ("gpt_neox", "Persimmon"),
    "OPTForCausalLM": ("opt", "OPT, Galactica"),
    "XGLMForCausalLM": ("opt", "XGLM"),
    "BioGptForCausalLM": ("opt", "BioGPT"),
    "FalconForCausalLM": ("falcon", "Falcon 1 and 2, Falcon-RW"),
    "BloomForCausalLM": ("bloom", "BLOOM, BLOOMZ"),
    "MptForCausalLM": ("bloom", "MPT"),
    "MPTForCausalLM": ("bloom:MptForCausalLM", "MPT, as its files name it"),
    "GPTJForCausalLM": ("gptj", "GPT-J"),
    "CodeGenForCausalLM": ("gptj", "CodeGen"),
    "ModernBertDecoderForCausalLM": ("modernbert", "ModernBERT's decoder (Ettin)"),
    "CTRLLMHeadModel": ("ctrl", "CTRL"),
}

#: Decoders with routed experts.
EXPERTS: Rows = {
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3 with routed experts"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "Qwen3-VL with routed experts, text part only"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "Qwen2 with routed experts and a shared one"),
    "MixtralForCausalLM": ("mixtral", "Mixtral"),
    "OlmoeForCausalLM": ("olmoe", "OLMoE"),
    "FlexOlmoForCausalLM": ("flex_olmo", "FlexOlmo"),
    "PhiMoEForCausalLM": ("phimoe:PhimoeForCausalLM", "Phi-3.5-MoE, as its checkpoints name it"),
    "PhimoeForCausalLM": ("phimoe", "Phi-3.5-MoE"),
    "GraniteMoeForCausalLM": ("granite_moe", "Granite 3 with routed experts"),
    "GraniteMoeSharedForCausalLM": ("granite_moe:GraniteMoeForCausalLM", "GraniteMoe with a shared expert"),
    "Glm4MoeForCausalLM": ("glm4_moe", "GLM-4.5 to 4.7"),
    "Glm4vMoeForConditionalGeneration": ("text_parts", "GLM-4.5V and 4.6V, text part only"),
    "SolarOpenForCausalLM": ("glm4_moe", "Solar Open"),
    "Dots1ForCausalLM": ("glm4_moe", "dots.llm1"),
    "GptOssForCausalLM": ("gpt_oss", "gpt-oss"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "MiniMax-M2"),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "ERNIE 4.5 with routed experts"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_moe", "Hunyuan-A13B"),
    "HYV3ForCausalLM": ("hunyuan_moe", "HY3"),
    "AfmoeForCausalLM": ("afmoe", "AFMoE: Trinity"),
    "ExaoneMoeForCausalLM": ("exaone_moe", "K-EXAONE"),
    "Llama4ForCausalLM": ("llama4", "Llama 4, text"),
    "Llama4ForConditionalGeneration": ("llama4", "Llama 4, text part only"),
    "MiMoV2FlashForCausalLM": ("mimo_v2", "MiMo-V2-Flash"),
    "DbrxForCausalLM": ("dbrx", "DBRX"),
    "MellumForCausalLM": ("mellum", "Mellum 2"),
}

#: Decoders with multi-head latent attention.
LATENT: Rows = {
    "DeepseekV2ForCausalLM": ("deepseek", "DeepSeek V2 and V2-Lite"),
    "DeepseekV3ForCausalLM": ("deepseek", "DeepSeek V3 and R1, Kimi K2"),
    "KimiK2ForCausalLM": ("deepseek:DeepseekV3ForCausalLM", "Kimi K2"),
    "Glm4MoeLiteForCausalLM": ("deepseek:DeepseekV3ForCausalLM", "GLM-4.7-Flash"),
    "DeepseekV32ForCausalLM": ("deepseek_sparse", "DeepSeek V3.2, sparse attention"),
    "GlmMoeDsaForCausalLM": ("deepseek_sparse", "GLM-5, sparse attention"),
    "MiniCPM3ForCausalLM": ("minicpm3", "MiniCPM3"),
    "LongcatFlashForCausalLM": ("longcat_flash", "LongCat-Flash"),
    "YoutuForCausalLM": ("deepseek", "Youtu-LLM"),
    "Mistral4ForCausalLM": ("mistral4", "Mistral 4, text"),
}

#: Decoders that keep running states, with or without attention beside them.
STATES: Rows = {
    "MambaForCausalLM": ("mamba", "Mamba"),
    "FalconMambaForCausalLM": ("mamba", "Falcon-Mamba"),
    "Mamba2ForCausalLM": ("mamba2", "Mamba-2"),
    "Qwen3NextForCausalLM": ("qwen3_next", "Qwen3-Next"),
    "Qwen3_5ForCausalLM": ("qwen3_next", "Qwen3.5, text"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_next:Qwen3_5ForCausalLM", "Qwen3.5, text part only"),
    "Qwen3_5MoeForCausalLM": ("qwen3_next:Qwen3_5ForCausalLM", "Qwen3.5 with experts, text"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_next:Qwen3_5ForCausalLM", "Qwen3.5 with experts, text part only"),
    "Lfm2ForCausalLM": ("lfm2", "LFM2"),
    "Lfm2MoeForCausalLM": ("lfm2", "LFM2 with routed experts"),
    "BambaForCausalLM": ("bamba", "Bamba"),
    "GraniteMoeHybridForCausalLM": ("bamba", "Granite 4"),
    "NemotronHForCausalLM": ("nemotron_h", "Nemotron-H"),
    "FalconH1ForCausalLM": ("falcon_h1", "Falcon-H1"),
    "JambaForCausalLM": ("jamba", "Jamba"),
    "Zamba2ForCausalLM": ("zamba2", "Zamba2"),
    "MiniMaxForCausalLM": ("minimax", "MiniMax-01"),
    "OlmoHybridForCausalLM": ("olmo_hybrid", "OLMo Hybrid"),
    "KimiLinearForCausalLM": ("kimi_linear", "Kimi-Linear"),
}

#: Encoders, for embeddings and for classes of texts and tokens.
ENCODERS: Rows = {
    "BertModel": ("bert", "BERT, for embeddings"),
    "BertForSequenceClassification": ("bert", "BERT, for classes and reranking"),
    "BertForTokenClassification": ("bert", "BERT, for classes of tokens"),
    "DistilBertModel": ("distilbert", "DistilBERT, for embeddings"),
    "DistilBertForSequenceClassification": ("distilbert", "DistilBERT, for classes and reranking"),
    "DistilBertForTokenClassification": ("distilbert", "DistilBERT, for classes of tokens"),
    "ElectraModel": ("electra", "ELECTRA, for embeddings"),
    "ElectraForSequenceClassification": ("electra", "ELECTRA, for classes and reranking"),
    "ElectraForTokenClassification": ("electra", "ELECTRA, for classes of tokens"),
    "ModernBertModel": ("modernbert", "ModernBERT, for embeddings"),
    "ModernBertForSequenceClassification": ("modernbert", "ModernBERT, for classes and reranking"),
    "ModernBertForTokenClassification": ("modernbert", "ModernBERT, for classes of tokens"),
    "RobertaForTokenClassification": ("roberta", "RoBERTa, for classes of tokens"),
    "XLMRobertaForTokenClassification": ("roberta:RobertaForTokenClassification", "XLM-RoBERTa, for classes of tokens"),
    "RobertaModel": ("roberta", "RoBERTa, for embeddings"),
    "RobertaForSequenceClassification": ("roberta", "RoBERTa, for classes"),
    "XLMRobertaModel": ("roberta:RobertaModel", "XLM-RoBERTa, for embeddings"),
    "XLMRobertaForSequenceClassification": (
        "roberta:RobertaForSequenceClassification",
        "XLM-RoBERTa, for classes and reranking",
    ),
}

#: Models of an encoder, which reads the prompt, and a decoder.
ENCODER_DECODERS: Rows = {
    "T5ForConditionalGeneration": ("t5", "T5 and Flan-T5"),
    "MT5ForConditionalGeneration": ("t5", "mT5"),
    "UMT5ForConditionalGeneration": ("t5", "UMT5"),
    "BartForConditionalGeneration": ("bart", "BART"),
    "MBartForConditionalGeneration": ("bart", "mBART"),
}

#: All rows, by what families have in common.
FAMILIES: Mapping[str, Rows] = {
    "decoders": DECODERS,
    "older decoders": OLDER,
    "experts": EXPERTS,
    "latent attention": LATENT,
    "states": STATES,
    "encoders": ENCODERS,
    "encoders with decoders": ENCODER_DECODERS,
}

_UNTIED = {"defaults": {"tie_word_embeddings": False}}
_WINDOWS_OFF = {"plain_rope": True, "defaults": {"use_sliding_window": False}}
_BAICHUAN = {"num_key_value_heads": "num_attention_heads", "max_position_embeddings": "model_max_length"}
_EXAONE = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = {
    "plain_rope": True,
    "rope_scaling": _YARN,
    "defaults": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}
#: Files say by `first_k_dense_replace` which layers have experts.
_DENSE_FIRST = {"mlp_layer_types": None, "mlp_bias": False}
_NULLABLE = ["mlp_layer_types", "q_lora_rank"]
_DEEPSEEK_V3 = {
    "read_as": "deepseek_v3",
    "plain_rope": True,
    "defaults": {**_DENSE_FIRST, "rope_interleave": True},
    "nullable": _NULLABLE,
}
_T5 = {"names": {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}}
_BART = {
    "names": {
        "hidden_size": "d_model",
        "num_attention_heads": "decoder_attention_heads",
        "num_hidden_layers": "decoder_layers",
    }
}
#: Architecture → how its config.json is read where that is not plain: the tag "config", see `frame_models`.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"plain_rope": True},
    "MistralForCausalLM": {"plain_rope": True},
    "Gemma2ForCausalLM": {"plain_rope": True},
    "MixtralForCausalLM": {"plain_rope": True},
    "GptOssForCausalLM": _GPT_OSS,
    "Qwen2MoeForCausalLM": {"plain_rope": True},
    "Qwen2ForCausalLM": _WINDOWS_OFF,
    "Qwen3ForCausalLM": _WINDOWS_OFF,
    "Qwen3MoeForCausalLM": _WINDOWS_OFF,
    "MiniCPMForCausalLM": {"defaults": {"tie_word_embeddings": True}},
    "BaichuanForCausalLM": {"names": _BAICHUAN},
    "BaiChuanForCausalLM": {"names": _BAICHUAN},
    "ExaoneForCausalLM": {"names": _EXAONE},
    "Qwen2VLForConditionalGeneration": {"read_as": "qwen2_vl_text", **_UNTIED},
    "Qwen2_5_VLForConditionalGeneration": {"read_as": "qwen2_5_vl_text", **_UNTIED},
    "Qwen3VLForConditionalGeneration": {"defaults": {"tie_word_embeddings": False, "use_sliding_window": False}},
    "Glm4vForConditionalGeneration": _UNTIED,
    "Glm4vMoeForConditionalGeneration": {"defaults": {"tie_word_embeddings": False, "use_qk_norm": False}},
    "DeepseekV2ForCausalLM": {"plain_rope": True, "defaults": _DENSE_FIRST, "nullable": _NULLABLE},
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK2ForCausalLM": _DEEPSEEK_V3,
    "Mamba2ForCausalLM": {"defaults": {"time_step_limit": [0.0, math.inf]}},
    "T5ForConditionalGeneration": _T5,
    "MT5ForConditionalGeneration": _T5,
    "UMT5ForConditionalGeneration": _T5,
    "BartForConditionalGeneration": _BART,
    "MBartForConditionalGeneration": _BART,
}
