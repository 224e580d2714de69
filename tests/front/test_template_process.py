"""Chat templates of clients in their own process: hostile ones end with one sentence, within their bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from frame.core.config.flat import from_flat
from frame.core.config.tree import FrameConfig
from frame.core.front.prompts import InvalidRequest
from frame.core.front.template_process import TemplateProcesses
from frame.core.interfaces.errors import RequestError
from frame.core.plugin_host.registry import Registry
from frame.interfaces import ChatOptions

CHOICES = Registry.load().choices(FrameConfig())
CHAT = [{"role": "user", "content": "Hello"}]
LONGEST = 100_000
#: for those that only a clock ends, and for the others: a busy machine must not end them
SECONDS, PATIENT = 1.0, 120.0
#: name -> (template, what the refusal says)
HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 seconds"),
    "product": ("{{ 'x' * 10 ** 10 }}", "more than 67108864 bytes|MemoryError"),
    "power": ("{{ 9 ** (9 ** 9) }}", "more than 1 seconds|more than 67108864 bytes"),
    "padding": ("{{ '%9999999999d' % 1 }}", "more than 67108864 bytes|cannot render"),
    "doubling": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "more than 67108864 bytes",
    ),
    "long text": ("{% for i in range(90000) %}{{ 'xxxxxxxxxxxxxxxx' }}{% endfor %}", "makes 1440000 characters"),
    "recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "cannot render"),
    "huge range": ("{{ range(10 ** 12) | list | length }}", "cannot render"),
    "deep nesting": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "cannot render|nests|more than"),
    "attributes": ("{{ messages.__class__.__mro__ }}", "cannot render"),
    "globals": ("{{ raise_exception.__globals__.os }}", "cannot render"),
    "changes": ("{{ messages.append(1) }}", "cannot render"),
    "own error": ("{{ raise_exception('x' * 100000) }}", "cannot render"),
    "syntax": ("{% for %}", "cannot render"),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(from_flat({"chat_template_seconds": PATIENT, "chat_template_bytes": 1 << 26}), CHOICES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(from_flat({"chat_template_seconds": SECONDS, "chat_template_bytes": 1 << 26}), CHOICES)
    yield made
    made.close()


async def render(processes: TemplateProcesses, template: str, **options: object) -> str:
    chat = ChatOptions(chat_template=template, **options)  # type: ignore[arg-type]
    return (await processes.render(CHAT, chat, LONGEST)).text or ""


async def test_an_honest_template(processes: TemplateProcesses) -> None:
    made = await processes.render(
        CHAT,
        ChatOptions(chat_template="{{ messages[0].content }}{{ mood }}", template_kwargs={"mood": 10**30}),
        LONGEST,
    )
    assert made.text == f"Hello{10**30}"
    assert made.token_ids is not None
    assert made.token_ids.size


@pytest.mark.some(2)
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_templates(processes: TemplateProcesses, hasty: TemplateProcesses, name: str) -> None:
    """Refused within the bounds, while this process's loop goes on; the next template is rendered."""
    template, message = HOSTILE[name]
    beats, running = 0, True

    async def beat() -> None:
        nonlocal beats
        while running:
            await asyncio.sleep(0.01)
            beats += 1

    heart = asyncio.create_task(beat())
    by_clock = message.startswith("more than 1 seconds")
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=message) as caught:
        await render(hasty if by_clock else processes, template)
    seconds, running = time.monotonic() - start, False
    assert beats + 1 >= seconds * 5  # a loop that waited would not have beaten
    await heart
    assert len(str(caught.value)) < 700
    assert caught.value.param in ("chat_template", "messages")


async def test_after_all_that_templates_are_rendered(processes: TemplateProcesses) -> None:
    assert await asyncio.gather(*(render(processes, "{{ messages[0].role }}") for _ in range(8))) == ["user"] * 8


async def test_too_many_wait(processes: TemplateProcesses) -> None:
    answers = await asyncio.gather(*(render(processes, "{{ 1 }}") for _ in range(80)), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RequestError)]
    assert [answer.status for answer in refused] == [429] * 16
    assert answers.count("1") == 64
