"""What checks do in a tab that shows the page, and what they expect."""

import json
from collections.abc import Awaitable, Callable

from tools.check_page.devtools import Tab

SLOW_S = 90.0
IS_IDLE = "!document.querySelector('.streaming')"
NUM_REPLIES = "document.querySelectorAll('.message.assistant').length"
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"
Check = Callable[[Tab], Awaitable[None]]


def expect(condition: object, words: str) -> None:
    if not condition:
        raise AssertionError(words)


async def settings(tab: Tab, **texts: str) -> None:
    """Load the page anew with values of the controls."""
    value = json.dumps(json.dumps({"texts": texts, "system": ""}))
    await tab.run(f"localStorage.setItem('pipeline.settings', {value})")
    await reload(tab)


async def ready(tab: Tab) -> None:
    await tab.until("document.readyState === 'complete' && document.title.includes('–')")
    await tab.until("document.querySelector('#model').textContent")


async def reload(tab: Tab) -> None:
    await tab.run("window.isOld = true; location.reload()")
    await tab.until("!window.isOld")
    await ready(tab)


async def send(tab: Tab, text: str) -> None:
    await tab.run("document.querySelector('#message').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def ask(tab: Tab, text: str) -> str:
    """Send a message and wait for the whole reply."""
    before = await tab.run(NUM_REPLIES)
    await send(tab, text)
    await tab.until(f"{NUM_REPLIES} > {before} && {IS_IDLE}", SLOW_S)
    reply: str = await tab.run(f"{LAST}.querySelector('.body').textContent")
    return reply
