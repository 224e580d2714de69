"""The page in a real Chromium: talking, stopping, tokens, tools, the key, the live view; keyboard and phone."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.page.chromium import Page, program
from tests.server.running import FAKE, REAL, Running, server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program() is None, reason="there is no Chromium (apt-get install chromium)"),
]
READY = "document.getElementById('model').options.length > 0"
DONE = "document.querySelectorAll('.figures').length === {}"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(
        FAKE, "--plugin.fake.delay", "0.02", "--plugin.fake.vocab_size", "2048", "--max-model-len", "1024"
    ) as s:
        yield s


@pytest.fixture
def page(running: Running, tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path / "profile")
    try:
        page.look()
        page.open(f"{running.url}/")
        page.wait(READY)
        yield page
        assert page.problems == []
        assert [url for url in page.requests if not url.startswith((running.url, "data:"))] == []
    finally:
        page.close()


def ask(page: Page, text: str, **settings: str) -> None:
    for name, value in settings.items():
        page.run(f"document.getElementById('{name}').value = {value!r}")
    page.run("document.getElementById('question').focus()")
    page.type(text)
    page.press("Enter")


def fake_stream(page: Page, *events: str) -> None:
    """Makes the next request be answered by these events instead of by the server."""
    frames = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
    page.run(
        "window.realFetch ??= window.fetch; window.sent = [];"
        "window.fetch = (url, options) => options.method === 'GET' ? realFetch(url, options)"
        f" : (sent.push(JSON.parse(options.body)), Promise.resolve(new Response({json.dumps(frames)})));"
    )


def test_an_answer_streams_and_the_conversation_goes_on(page: Page) -> None:
    ask(page, "one two three", max_tokens="30")
    page.wait(DONE.format(1))
    assert "30 tokens" in page.text(".figures")
    assert "cut at the limit" in page.text(".figures")
    ask(page, "four five six")
    page.wait(DONE.format(2))
    assert page.run("[...document.querySelectorAll('.message h2')].map(e => e.textContent)") == ["You", "demo"] * 2
    page.click("#again")
    page.wait(DONE.format(2))
    page.click("#clear")
    assert page.run("document.querySelectorAll('.message').length") == 0
    assert page.run("document.activeElement.id") == "question"


def test_stop_ends_the_answer_in_the_engine(page: Page, running: Running) -> None:
    for stop in (lambda: page.press("Escape"), lambda: page.click("#stop")):
        page.click("#clear")
        ask(page, "a long text", max_tokens="900")
        page.wait("document.querySelector('.message.assistant .text')")
        stop()
        page.wait(DONE.format(1))
        assert "stopped" in page.text(".figures")
        page.wait("!document.getElementById('send').hidden")
        page.wait("fetch('stats').then(r => r.json()).then(s => s.engine.running === 0)")
    assert running.process.poll() is None


def test_tokens_show_their_probability_to_mouse_and_keyboard(page: Page) -> None:
    page.click("#logprobs")
    assert page.run("!document.getElementById('scale').hidden")
    ask(page, "one two three four five", max_tokens="12")
    page.wait(DONE.format(1))
    shown = page.run("[...document.querySelectorAll('.token')].map(e => e.textContent)")
    assert "".join(shown) == "one two three four five"  # the special tokens around it are no text of the answer
    page.run("document.querySelector('.token').focus()")
    assert page.run("!document.getElementById('tip').hidden")
    assert page.run("document.querySelectorAll('#tip .row').length") >= 5
    assert page.run("document.querySelectorAll('#tip .chosen').length") == 1
    page.press("ArrowRight")
    assert page.run("document.activeElement === document.querySelectorAll('.token')[1]")
    page.press("End")
    assert page.run("document.activeElement === [...document.querySelectorAll('.token')].at(-1)")
    page.press("Escape")
    assert page.run("document.getElementById('tip').hidden")


def test_tokens_that_share_a_character_are_shown_as_one(page: Page) -> None:
    page.click("#logprobs")
    part = '{{"token": "?", "bytes": [{}], "logprob": -0.7, "top_logprobs": []}}'
    entries = ",".join(part.format(byte) for byte in (226, 130, 172))
    fake_stream(page, f'{{"choices": [{{"delta": {{"content": "€"}}, "logprobs": {{"content": [{entries}]}}}}]}}')
    ask(page, "price?")
    page.wait(DONE.format(1))
    assert page.run("[...document.querySelectorAll('.token')].map(e => e.textContent)") == ["€"]


def test_reasoning_and_tool_calls_are_shown_and_results_go_back(page: Page) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": part}} for part in ('{"city": ', '"Rome"}')]
    deltas = [{"role": "assistant", "reasoning": "Let me look."}, *({"tool_calls": [part]} for part in (call, *more))]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    fake_stream(page, *map(json.dumps, events), '{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}')
    page.click("#tools-example")
    ask(page, "weather?")
    page.wait(DONE.format(1))
    assert page.run("sent[0].tools[0].function.name") == "get_weather"
    assert page.text(".reasoning .text") == "Let me look."
    assert page.text(".call h3") == "calls get_weather"
    assert '"city": "Rome"' in page.text(".call pre")
    fake_stream(page, '{"choices": [{"delta": {"content": "Sunny."}, "finish_reason": "stop"}]}')
    page.run("document.querySelector('.result textarea').focus()")
    page.type("sunny")
    page.click(".result button")
    page.wait(DONE.format(2))
    sent = page.run("sent[0].messages")
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert (sent[2]["tool_call_id"], sent[2]["content"]) == ("call_1", "sunny")


def test_constraints_are_sent_in_the_apis_form(page: Page) -> None:
    fake_stream(page, '{"choices": [{"delta": {"content": "{}"}, "finish_reason": "stop"}]}')
    page.run("document.getElementById('format').value = 'json_schema'")
    page.run("document.getElementById('format').dispatchEvent(new Event('change', {bubbles: true}))")
    ask(page, "a city")
    page.wait(DONE.format(1))
    assert page.run("sent[0].response_format.json_schema.schema.required") == ["city", "people"]
    page.run("document.getElementById('format').value = 'choice'")
    ask(page, "yes?", constraint="yes\nno")
    page.wait(DONE.format(2))
    assert page.run("sent[1].structured_outputs") == {"choice": ["yes", "no"]}
    page.run("document.getElementById('constraint').value = ''")
    ask(page, "yes?")
    assert page.text("#constraint-error") == "Write what answers must fit."
    assert page.run("document.activeElement.id") == "constraint"


def test_errors_are_sentences_where_they_belong(page: Page) -> None:
    ask(page, "x", tools="[{")
    assert page.text("#tools-error").startswith("This is not JSON:")
    assert page.run("document.activeElement.id") == "tools"
    page.run("document.getElementById('tools').value = ''")
    ask(page, "", extra='{"temperature": -1}')
    page.wait("document.querySelector('.message .error')")
    assert "temperature" in page.text(".message .error")
    page.problems.clear()  # Chromium logs every status from 400 on
    page.run("document.getElementById('extra').value = ''")
    ask(page, "y", max_tokens="3")
    page.wait(DONE.format(1))


def test_the_live_view_counts_what_runs(page: Page) -> None:
    ask(page, "a long text", max_tokens="900")
    page.wait("document.querySelector('.message.assistant .text')")
    page.run("document.getElementById('tab-chat').focus()")
    page.press("ArrowRight")
    assert page.run("document.activeElement.id") == "tab-engine"
    page.wait("document.getElementById('live-running').textContent === '1'")
    page.wait("document.querySelector('.card polyline').points.length > 2")
    assert page.run("location.hash") == "#engine"
    page.click("#tab-chat")
    page.press("Escape")
    page.wait(DONE.format(1))


def test_a_single_engine_is_no_table(page: Page) -> None:
    page.click("#tab-engine")
    page.wait("document.getElementById('engine-note').textContent.includes('KV blocks')")
    assert page.run("document.getElementById('ranks').hidden")
    assert page.run("document.getElementById('tiers').hidden"), "and no connector has tiers"


COUNTERS = {
    "offload_lookup_tokens": 4000, "offload_hit_tokens": 3000, "offload_load_bytes": 3 << 30,
    "offload_load_seconds": 1.5, "offload_save_bytes": 1 << 20, "offload_unsaved_blocks": 4, "nixl_loaded_blocks": 12, 
    "nixl_failed_blocks": 5,
    "odd": 1,
}  # fmt: skip
GAUGES = {"offload_used_bytes": 1 << 29, "offload_size_bytes": 1 << 30, "nixl_held_blocks": 7}
TIERS = "[...document.querySelectorAll('#tiers tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"


def test_tiers_are_rows_that_say_what_they_hold_and_what_travelled(tmp_path: Path) -> None:
    page = Page(tmp_path / "profile")
    fake = "--plugin.fake.counters", json.dumps(COUNTERS), "--plugin.fake.gauges", json.dumps(GAUGES)
    try:
        with server(FAKE, *fake) as running:
            page.look()
            page.open(f"{running.url}/#engine")
            page.wait(f"{TIERS}.length === 2")
            assert page.run(TIERS) == [
                [
                    "offload",
                    "host",
                    "512 MiB of 1 GiB (50 %)",
                    "75 % of tokens",
                    "3 GiB, 1.5 s, 2 GiB/s",
                    "1 MiB",
                    "–",
                    "4 saves",
                ],
                ["nixl", "engine", "–", "–", "12 blocks", "–", "7 blocks", "5 loads"],
            ]
            assert not page.run("document.getElementById('tiers').hidden")
            for width in (1280, 360):
                page.look(width=width, phone=width < 1000)
                assert page.run("document.documentElement.scrollWidth") <= width
            assert page.problems == []
    finally:
        page.close()


def test_an_engine_s_host_memory_is_seen_to_fill(tmp_path: Path) -> None:
    page = Page(tmp_path / "profile")
    try:
        with server(REAL, "--kv-offloading-size", "0.01", "--num-threads", "1") as running:
            page.look()
            page.open(f"{running.url}/#engine")
            body = {"prompt": "the fox went down to the sea again. " * 12, "max_tokens": 4}
            page.wait("document.getElementById('engine-note').textContent.includes('KV blocks')")
            httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).raise_for_status()
            page.wait(
                f"{TIERS}.some(row => row[0] === 'offload' && row[1] === 'host' && /^[0-9.]+ [KM]iB/.test(row[5]))"
            )
    finally:
        page.close()


@pytest.fixture(scope="module")
def two_engines() -> Iterator[Running]:
    with server(
        FAKE, "--plugin.fake.delay", "0.01", "--plugin.fake.startup", "2", "--data-parallel-size", "2"
    ) as running:
        yield running


def test_engines_are_rows_that_say_what_each_does_and_why_one_is_away(two_engines: Running, tmp_path: Path) -> None:
    page = Page(tmp_path / "profile")
    column = "[...document.querySelectorAll('#ranks tbody td:nth-child({})')].map(e => e.textContent)"
    numbers = f"{column}.map(Number)"

    def wait(place: int, texts: list[str]) -> None:
        page.wait(f"JSON.stringify({column.format(place)}) === {json.dumps(json.dumps(texts, separators=(',', ':')))}")

    try:
        page.look()
        page.open(f"{two_engines.url}/#engine")
        wait(1, ["0", "1"])
        assert not page.run("document.getElementById('ranks').hidden")
        wait(6, ["serving", "serving"])
        wait(2, ["0", "0"])
        body = {"prompt": "once upon a time", "max_tokens": 1200, "ignore_eos": True}
        answers: list[int] = []

        def ask_one() -> None:
            answers.append(httpx.post(f"{two_engines.url}/v1/completions", json=body, timeout=120).status_code)

        asking = [threading.Thread(target=ask_one) for _ in range(4)]
        for thread in asking:
            thread.start()
        wait(2, ["2", "2"])
        page.wait(f"{numbers.format(5)}.every(count => count > 0)")
        assert page.run(f"{column.format(4)}.every(text => /^[0-9.]+ %$/.test(text))")
        page.wait("document.getElementById('live-running').textContent === '4'")
        os.kill(two_engines.children_named("engine")[0], signal.SIGKILL)
        page.wait(f"{column.format(6)}.filter(text => text === 'serving').length === 1")
        (away,) = set(page.run(column.format(6))) - {"serving"}
        assert "killed by SIGKILL" in away
        assert page.run("document.getElementById('engine-problem').hidden"), "the other one serves"
        wait(6, ["serving", "serving"])
        for width in (1280, 360):
            page.look(width=width, phone=width < 1000)
            assert page.run("document.documentElement.scrollWidth") <= width
        for thread in asking:
            thread.join(120)
        assert answers == [200] * 4
        wait(2, ["0", "0"])
        assert page.problems == []
    finally:
        page.close()


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(page: Page, dark: bool) -> None:
    page.look(width=360, height=740, phone=True, dark=dark)
    ask(page, "w" * 200, max_tokens="20")
    page.wait(DONE.format(1))
    for step in ("#tab-engine", "#tab-chat", "#settings-open"):
        page.click(step)
        assert page.run("document.documentElement.scrollWidth") <= 360, step
    assert page.run("document.activeElement.id") == "model"
    page.press("Escape")
    assert page.run("document.activeElement.id") == "settings-open"


def test_the_key_is_asked_for_kept_for_the_tab_and_never_in_an_address(tmp_path: Path) -> None:
    with server(FAKE, "--api-key", "secret") as running:
        page = Page(tmp_path / "profile")
        try:
            page.look()
            page.open(f"{running.url}/")
            page.wait("document.getElementById('key-dialog')?.open")
            for key in ("wrong", "secret"):
                page.run("document.getElementById('key').focus()")
                page.type(key)
                page.press("Enter")
                if key == "wrong":
                    page.wait("document.getElementById('key-error').textContent !== ''")
            page.wait(READY)
            ask(page, "one", max_tokens="3")
            page.wait(DONE.format(1))
            assert page.run("Object.values(sessionStorage).includes('secret') && localStorage.length === 0")
            assert not [url for url in page.requests if "secret" in url]
            assert page.run("document.cookie") == ""
            page.click("#forget-key")
            page.wait("document.getElementById('key-dialog')?.open")
        finally:
            page.close()


HOSTILE = """# Title <img src=x onerror=alert(1)>

<script>window.bad = 1</script> [link](javascript:window.bad=1) ![x](https://elsewhere.example/x.png)
[data](data:text/html,<script>bad</script>) [good](https://example.org/a?b=1) https://example.org/plain.

| a | b |
|---|:-:|
| **1** | `<b>2</b>` |

- one
  - two *deep*
1. first

```html
<iframe src="https://elsewhere.example"></iframe>
```
> said &lt;b&gt; <svg onload=alert(1)>
"""


def test_markdown_is_shown_and_no_answer_can_bring_code(page: Page) -> None:
    for size in (7, 1 << 20):  # in pieces and at once
        page.click("#clear")
        pieces = [HOSTILE[at : at + size] for at in range(0, len(HOSTILE), size)]
        fake_stream(page, *(json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces))
        ask(page, "show it")
        page.wait(DONE.format(1))
        kinds = "[...document.querySelectorAll('.markdown *')].map(e => e.tagName.toLowerCase())"
        assert set(page.run(kinds)) <= {
            "div", "h3", "p", "a", "table", "thead", "tbody", "tr", "th", "td", "strong", "code", "ul", "ol", "li",
            "em", "pre", "blockquote",
        }  # fmt: skip
        links = page.run("[...document.querySelectorAll('.markdown a')].map(e => e.href)")
        assert links == ["https://elsewhere.example/x.png", "https://example.org/a?b=1", "https://example.org/plain"]
        assert page.run("window.bad === undefined")
        assert "<script>window.bad = 1</script>" in page.text(".markdown")
        assert page.text(".markdown pre") == '<iframe src="https://elsewhere.example"></iframe>'
        assert page.run("document.querySelectorAll('.markdown ul ul em').length") == 1
        assert page.run("[...document.querySelectorAll('.markdown td')].map(e => e.textContent)") == ["1", "<b>2</b>"]
        assert page.run("sent[0].messages.length") == 1


def test_special_tokens_and_calls_are_no_text_of_the_answer(page: Page) -> None:
    page.click("#logprobs")

    def entry(token: str) -> dict[str, object]:
        return {"token": token, "bytes": list(token.encode()), "logprob": -0.1, "top_logprobs": []}

    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    events = [
        {"choices": [{"delta": {"role": "assistant"}, "logprobs": {"content": [entry("He"), entry("llo")]}}]},
        {"choices": [{"delta": {"content": "Hello"}, "logprobs": {"content": [entry("<tool>"), entry('{"look"}')]}}]},
        {"choices": [{"delta": {"tool_calls": [call]}, "logprobs": {"content": [entry("<|im_end|>")]}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    ]
    fake_stream(page, *map(json.dumps, events))
    ask(page, "look")
    page.wait(DONE.format(1))
    assert page.run("[...document.querySelectorAll('.token')].map(e => e.textContent)") == ["He", "llo"]
    assert page.run("document.querySelectorAll('.call').length") == 1
    assert "im_end" not in page.text(".message.assistant")


def test_settings_that_are_active_stand_beside_the_message(page: Page) -> None:
    assert page.run("document.getElementById('active').hidden")
    page.run("document.getElementById('temperature').value = '0.5'")
    page.click("#tools-example")
    shown = page.run("[...document.querySelectorAll('#active li')].map(e => e.textContent)")
    assert shown == ["Temperature 0.5", "1 tool"]


def test_a_view_that_opens_late_shows_what_was(page: Page) -> None:
    ask(page, "a long text", max_tokens="120")
    page.wait(DONE.format(1), seconds=60)
    page.click("#tab-engine")
    page.wait("document.querySelector('.card polyline').points.length > 1")
    peak = page.run("document.querySelector('#live-output').closest('.card').querySelector('.peak').textContent")
    assert float(peak.removeprefix("peak ")) > 1


@pytest.mark.parametrize(
    "text",
    [
        "# a" + " " * 20_000 + "b",
        "```" + " " * 100_000 + "`",
        "a|b\n-|" + " " * 100_000 + "x",
        "- " * 50_000 + "x",
        "[" * 50_000 + "`" * 50_001 + "*_" * 50_000,
        "> " * 50_000,
        "https://" + "." * 50_000,
    ],
    ids=["heading", "fence", "table", "rule", "marks", "quotes", "address"],
)
def test_a_hostile_line_does_not_stop_the_page(page: Page, text: str) -> None:
    fake_stream(page, json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}))
    ask(page, "show it")
    page.wait(DONE.format(1), seconds=10)
