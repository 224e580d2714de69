"""The default parsers by name: class, models, an example output for the contract suite, aliases. Imports no parser."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ARGUMENTS = '{"city": "Paris", "days": 3}'
_OBJECT = f'{{"name": "get_weather", "arguments": {_ARGUMENTS}}}'
_PARAMETERS = f'{{"name": "get_weather", "parameters": {_ARGUMENTS}}}'
_FUNCTION = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
)
_PYTHONIC = "get_weather(city='Paris', days=3)"
_GLM = "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>"
_INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
)
_DSML = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
_BEGIN, _SEP, _END = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
_STEP = (
    '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Paris</steptml:parameter>\n'
    '<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke>'
)
_M3 = "]<]minimax[>["
_ELEMENTS = f"{_M3}<city>Paris{_M3}</city>{_M3}<days>3{_M3}</days>"
_XTML = (
    '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
_THOUGHT, _SAID = "The user is in Paris.", "It rains."
_END_OF_THOUGHT = f"\n</think>\n\n{_SAID}"
_ANALYSIS = f"<|channel|>analysis<|message|>{_THOUGHT}<|end|><|start|>assistant"

#: Name → (class, summary, example, aliases…).
TOOL_PARSERS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "json": ("json_list:JsonListParser", "a JSON list, in which demanded calls are written", f"[{_PARAMETERS}]"),
    "hermes": (
        "json_formats:HermesParser", "Hermes, Qwen 2.5, Qwen3, Granite 4", f"<tool_call>\n{_OBJECT}\n</tool_call>",
        "qwen25", "ernie45", "granite4",
    ),
    "qwen3_coder": (
        "formats:Qwen3CoderParser", "Qwen3-Coder, Qwen3.5, Step 3.5", f"<tool_call>\n{_FUNCTION}\n</tool_call>",
        "qwen3_xml", "step3p5",
    ),
    "llama3_json": ("json_formats:Llama3JsonParser", "Llama 3.1 to 3.3", _PARAMETERS, "llama4_json"),
    "pythonic": ("pythonic:PythonicParser", "Llama 3.2, ToolACE", f"[{_PYTHONIC}]"),
    "llama4_pythonic": (
        "pythonic:Llama4PythonicParser", "Llama 4", f"<|python_start|>[{_PYTHONIC}]<|python_end|>",
    ),
    "olmo3": ("pythonic:Olmo3Parser", "OLMo 3", f"<function_calls>\n{_PYTHONIC}\n</function_calls>"),
    "mistral": ("mistral:MistralParser", "Mistral, Magistral, Devstral", f"[TOOL_CALLS] [{_OBJECT}]"),
    "deepseek_v3": (
        "formats:DeepSeekV3Parser", "DeepSeek-V3, R1",
        f"{_BEGIN}function{_SEP}get_weather\n```json\n{_ARGUMENTS}\n```{_END}",
    ),
    "deepseek_v31": (
        "formats:DeepSeekV31Parser", "DeepSeek-V3.1", f"{_BEGIN}get_weather{_SEP}{_ARGUMENTS}{_END}",
    ),
    "deepseek_v32": (
        "formats:DeepSeekV32Parser", "DeepSeek-V3.2",
        f"<｜DSML｜function_calls>\n{_DSML}</｜DSML｜function_calls>",
    ),
    "deepseek_v4": (
        "formats:DeepSeekV4Parser", "DeepSeek-V4", f"<｜DSML｜tool_calls>\n{_DSML}</｜DSML｜tool_calls>",
    ),
    "glm45": ("formats:Glm45Parser", "GLM-4.5 and 4.6", f"<tool_call>get_weather\n{_GLM}\n</tool_call>"),
    "glm47": (
        "formats:Glm47Parser", "GLM-4.7 and later", f"<tool_call>get_weather{_GLM}</tool_call>".replace("\n", ""),
    ),
    "kimi_k2": (
        "formats:KimiK2Parser", "Kimi K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "kimi_k3": ("xtml:KimiK3Parser", "Kimi K3", f"<|open|>tools<|sep|>{_XTML}<|close|>tools<|sep|>"),
    "openai": (
        "harmony:HarmonyParser", "gpt-oss, with its reasoning",
        f"{_ANALYSIS}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
    ),
    "minimax_m2": (
        "formats:MiniMaxM2Parser", "MiniMax-M2", f"<minimax:tool_call>\n{_INVOKE}</invoke>\n</minimax:tool_call>",
    ),
    "minimax_m3": (
        "elements:MiniMaxM3Parser", "MiniMax-M3",
        f'{_M3}<tool_call>\n{_M3}<invoke name="get_weather">{_ELEMENTS}{_M3}</invoke>\n{_M3}</tool_call>',
    ),
    "mimo": (
        "formats:MiMoParser", "MiMo-V2",
        "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "step3": (
        "formats:Step3Parser", "Step 3",
        f"<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>{_STEP}<｜tool_call_end｜>\n<｜tool_calls_end｜>",
    ),
    "gemma4": (
        "formats:Gemma4Parser", "Gemma 4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    ),
    "functiongemma": (
        "formats:FunctionGemmaParser", "FunctionGemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
    ),
    "lfm2": ("pythonic:Lfm2Parser", "LFM2", f"<|tool_call_start|>[{_PYTHONIC}]<|tool_call_end|>"),
    "apertus": (
        "json_formats:ApertusParser", "Apertus", f'<|tools_prefix|>[{{"get_weather": {_ARGUMENTS}}}]<|tools_suffix|>',
    ),
    "cohere_command3": (
        "json_formats:CohereCommandParser", "Cohere's Command A and later",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{_ARGUMENTS}}}]<|END_ACTION|>",
        "cohere_command4",
    ),
    "gigachat3": (
        "json_formats:GigaChat3Parser", "GigaChat 3", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_OBJECT}",
    ),
    "xlam": ("json_formats:XlamParser", "xLAM 2", f"[{_OBJECT}]"),
    "seed_oss": ("formats:SeedOssParser", "Seed-OSS", f"<seed:tool_call>\n{_FUNCTION}\n</seed:tool_call>"),
    "granite": ("json_formats:GraniteParser", "Granite 3", f"<|tool_call|>[{_OBJECT}]"),
    "jamba": (
        "json_formats:JambaParser", "Jamba, LongCat", f"<tool_calls>[\n{_OBJECT}\n]</tool_calls>",
        "longcat", "hunyuan_a13b", "minimax",
    ),
    "internlm": (
        "json_formats:InternLmParser", "InternLM 2.5 and 3", f"<|action_start|><|plugin|>{_PARAMETERS}<|action_end|>",
    ),
    "granite-20b-fc": ("json_formats:Granite20bParser", "Granite 20B", f"<function_call> {_OBJECT}"),
    "phi4_mini_json": ("json_formats:Phi4MiniParser", "Phi-4-mini", f"functools[{_OBJECT}]"),
    "template": (
        "template:TemplateParser", "any model: finds the format in the chat template",
        f"<tool_call>\n{_OBJECT}\n</tool_call>",
    ),
    "functionary_v3": (
        "formats:FunctionTagParser", "Functionary 3.1", f"<function=get_weather>{_ARGUMENTS}</function>",
    ),
})  # fmt: skip

#: Tool parser → model types that write its format ("*": any), and a text that the chat templates of such models hold.
#: "auto" takes the first that fits; a template without the text belongs to a model with another format.
MODELS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "mimo": ("mimo mimo_v2_flash", "<function="),
    "qwen3_coder": (
        "qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text step3p5 step3p7 granite"
        " granitemoehybrid",
        "<function=",
    ),
    "hermes": (
        "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next ernie4_5 ernie4_5_moe granite granitemoe granitemoehybrid mimo",
        "<args-json-object>",
    ),
    "granite": ("granite granitemoe granitemoeshared granitemoehybrid", "<|tool_call|>"),
    "xlam": ("llama qwen2", "make calls in a single JSON array"),
    "llama3_json": ("llama", "Environment: ipython"),
    "llama4_pythonic": ("llama4 llama4_text", "<|python_start|>"),
    "mistral": ("mistral mixtral ministral ministral3 mistral3 mistral4", "[TOOL_CALLS]"),
    "deepseek_v3": ("deepseek_v3 deepseek_v2", "```json"),
    "deepseek_v31": ("deepseek_v3", "<｜tool▁sep｜>"),
    "deepseek_v32": ("deepseek_v3 deepseek_v32", "｜DSML｜"),
    "deepseek_v4": ("deepseek_v4", "｜DSML｜"),
    "gigachat3": ("deepseek_v3", "<|role_sep|>"),
    "glm47": ("glm4_moe glm4_moe_lite glm_moe_dsa", "{function-name}<arg_key>"),
    "glm45": ("glm4_moe glm4_moe_lite glm_moe_dsa", "<arg_key>"),
    "kimi_k2": ("kimi_k2 deepseek_v3", "<|tool_call_begin|>"),
    "kimi_k3": ("kimi_k3", "<|open|>"),
    "openai": ("gpt_oss", "<|channel|>"),
    "minimax_m2": ("minimax minimax_m2", "<minimax:tool_call>"),
    "minimax_m3": ("minimax_m3 minimax_m3_vl minimax_m3_vl_text", "]<]minimax[>["),
    "step3": ("step3 step3_text step3_vl", "steptml:"),
    "gemma4": ("gemma4 gemma4_text gemma4_unified gemma4_unified_text", "<|tool_call>"),
    "functiongemma": ("gemma3 gemma3_text", "<start_function_call>"),
    "lfm2": ("lfm2 lfm2_moe lfm2_vl", ""),
    "apertus": ("apertus", "<|tools_prefix|>"),
    "cohere_command3": ("cohere cohere2 cohere2_moe cohere2_vision", "<|START_ACTION|>"),
    "seed_oss": ("seed_oss", "<seed:tool_call>"),
    "olmo3": ("olmo3", "<function_calls>"),
    "template": ("*", ""),
})  # fmt: skip

REASONING_PARSERS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "qwen3": (
        "thinking:ThinkParser", "<think>…</think>, opened by prompt or output: Qwen3, GLM-4.5, DeepSeek-V3.1, Kimi K2",
        f"<think>\n{_THOUGHT}{_END_OF_THOUGHT}", "glm45", "deepseek_v3", "deepseek_v4", "kimi_k2", "holo2", "ernie45",
        "mimo", "nemotron_v3",
    ),
    "deepseek_r1": (
        "thinking:ImplicitThinkParser", "…</think>, always reasoning first: DeepSeek-R1, QwQ, MiniMax-M2",
        f"{_THOUGHT}{_END_OF_THOUGHT}", "minimax_m2", "step3", "step3p5",
    ),
    "mistral": ("thinking:MistralThinkParser", "Magistral", f"[THINK]{_THOUGHT}[/THINK]{_SAID}"),
    "seed_oss": ("thinking:SeedThinkParser", "Seed-OSS", f"<seed:think>{_THOUGHT}</seed:think>{_SAID}"),
    "granite": (
        "thinking:GraniteThinkParser", "Granite 3.2 and 3.3",
        f"Here is my thought process: {_THOUGHT}\n\nHere is my response: {_SAID}",
    ),
    "hunyuan_a13b": (
        "thinking:HunyuanThinkParser", "Hunyuan A13B",
        f"<think>\n{_THOUGHT}\n</think>\n<answer>\n{_SAID}\n</answer>",
    ),
    "gemma4": ("thinking:Gemma4ThinkParser", "Gemma 4", f"<|channel>thought\n{_THOUGHT}\n<channel|>{_SAID}"),
    "apertus": ("thinking:ApertusThinkParser", "Apertus", f"<|inner_prefix|>{_THOUGHT}<|inner_suffix|>{_SAID}"),
    "cohere_command3": (
        "thinking:CohereThinkParser", "Cohere's Command A Reasoning and later",
        f"<|START_THINKING|>{_THOUGHT}<|END_THINKING|><|START_RESPONSE|>{_SAID}<|END_RESPONSE|>", "cohere_command4",
    ),
    "kimi_k3": (
        "xtml:KimiK3ThinkParser", "Kimi K3",
        f"<|open|>think<|sep|>{_THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>{_SAID}<|close|>response<|sep|>",
    ),
    "minimax_m3": ("thinking:MiniMaxM3ThinkParser", "MiniMax-M3", f"<mm:think>{_THOUGHT}</mm:think>{_SAID}"),
    "openai_gptoss": (
        "harmony:HarmonyReasoningParser", "gpt-oss", f"{_ANALYSIS}<|channel|>final<|message|>{_SAID}<|return|>",
    ),
})  # fmt: skip
