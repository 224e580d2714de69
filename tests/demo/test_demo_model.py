"""The shipped demo model: its files, its chat template, and what it answers greedily with transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import frame.plugins.models.demo

FOLDER = Path(frame.plugins.models.demo.__file__).parent
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def reply(tokenizer: Any, model: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    inputs = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=120, do_sample=False, temperature=None, top_p=None)
    text: str = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_weights_are_small_and_bf16() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 5_000_000
    with safe_open(path, "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert 1_500_000 <= sum(t.numel() for t in tensors) <= 2_500_000


def test_loads_without_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(FOLDER)
        AutoTokenizer.from_pretrained(FOLDER)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    printed = capfd.readouterr()
    assert "warning" not in (printed.out + printed.err).lower()


@pytest.mark.parametrize("text", ["Hello, world!", "naïve ☃ 你好 \U0001f600", "  two\n\nlines\t", "x = {'a': 10}"])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_digits_are_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("4711") == ["4", "7", "1", "1"]


def test_template_renders_every_role(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
        {"role": "assistant", "content": "It is sunny."},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False)
    assert text == (
        "<|begin|><|system|>Be kind.\nTools, to be called by answering with JSON:\n"
        f"{json.dumps(WEATHER)}<|end|><|user|>Weather in Rome?<|end|>"
        '<|assistant|>{"name": "get_weather", "arguments": {"city": "Rome"}}<|end|>'
        '<|tool|>{"sky": "sunny"}<|end|><|assistant|>It is sunny.<|end|>'
    )


def test_template_takes_arguments_as_text_and_opens_or_continues_a_reply(tokenizer: Any) -> None:
    user = {"role": "user", "content": "Hi"}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    text = tokenizer.apply_chat_template([user, call], tokenize=False)
    assert text == '<|begin|><|user|>Hi<|end|><|assistant|>{"name": "f", "arguments": {"a": 1}}<|end|>'
    opened = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert opened == "<|begin|><|user|>Hi<|end|><|assistant|>"
    started = [user, {"role": "assistant", "content": "Hello the"}]
    continued = tokenizer.apply_chat_template(started, continue_final_message=True, tokenize=False)
    assert continued == "<|begin|><|user|>Hi<|end|><|assistant|>Hello the"


def test_template_refuses_other_roles(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="no role 'critic'; there are: system, developer, user, assistant, tool"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 23 + 45?", "23 + 45 = 68."),
        ("What is 81 - 46?", "81 - 46 = 35."),
        ("What is 7 times 8?", "7 * 8 = 56."),
        ("Which is bigger, 45 or 72?", "72 is bigger."),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."),
        ("Repeat: purple window seven", "purple window seven"),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("Anna is 31 and lives in Rome. Where does Anna live?", "Anna lives in Rome."),
        ("Anna is 31 and lives in Rome. How old is Anna?", "Anna is 31 years old."),
        ("The key is in the red box. The coin is in the blue box. Where is the coin?", "The coin is in the blue box."),
    ],
)
def test_answers_small_questions(tokenizer: Any, model: Any, question: str, answer: str) -> None:
    assert reply(tokenizer, model, [{"role": "user", "content": question}]) == answer


@pytest.mark.parametrize(
    ("question", "word"),
    [("Who are you?", "frame"), ("Hello, my name is Nina!", "Nina"), ("Tell me a story about a fox.", "fox"),
     ("What is the weather today?", "cannot"), ("Who was Napoleon?", "Napoleon")],
)  # fmt: skip
def test_talks(tokenizer: Any, model: Any, question: str, word: str) -> None:
    assert word in reply(tokenizer, model, [{"role": "user", "content": question}])


def test_calls_a_tool_and_words_its_result(tokenizer: Any, model: Any) -> None:
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    text = reply(tokenizer, model, messages, [WEATHER])
    assert json.loads(text) == {"name": "get_weather", "arguments": {"city": "Rome"}}
    messages += [
        {"role": "assistant", "content": text},
        {"role": "tool", "content": '{"temperature": 21, "sky": "sunny"}'},
    ]
    assert reply(tokenizer, model, messages, [WEATHER]) == "It is sunny in Rome, at 21 degrees."


def test_remembers_a_name(tokenizer: Any, model: Any) -> None:
    messages = [{"role": "user", "content": "My name is Clara."}]
    messages.append({"role": "assistant", "content": reply(tokenizer, model, messages)})
    messages.append({"role": "user", "content": "What is my name?"})
    assert reply(tokenizer, model, messages) == "Your name is Clara."
