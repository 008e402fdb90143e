"""The reasoning of a reply, of a server whose model always begins with it."""

from tests.e2e.server import Server
from tools.check_page.actions import IS_IDLE, LAST, SLOW_S, Check, expect, send, settings
from tools.check_page.devtools import Tab

BUTTON = f"{LAST}?.querySelector('.foot button')"
MESSAGE = " That is enough."


def serving() -> Server:
    return Server("chat.reasoning_parser=deepseek_r1", f'chat.reasoning_budget_message="{MESSAGE}"')


async def a_reasoning_can_be_ended(tab: Tab) -> None:
    await settings(tab, max_tokens="200")
    await send(tab, "Write a long story about the sea.")
    await tab.until(
        f"{BUTTON}?.textContent === 'Answer now' && {LAST}.querySelector('.reasoning p').textContent", SLOW_S
    )
    await tab.click(".message.assistant:last-of-type .foot button")
    await tab.until(f"{LAST}.querySelector('.reasoning p').textContent.endsWith({MESSAGE!r})", SLOW_S)
    await tab.until(IS_IDLE, SLOW_S)
    expect(not await tab.run(f"!!{LAST}.querySelector('.failure')"), "the reply failed")
    expect(not await tab.run(f"{BUTTON}?.textContent === 'Answer now'"), "the button is still there")


CHECKS: tuple[Check, ...] = (a_reasoning_can_be_ended,)
