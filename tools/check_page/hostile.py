"""What a reply may be made of by a model that wants to stop the page: it is drawn soon, also each time that the page is
loaded, because chats are kept. Functions of a tab that shows the page, run after those of checks.py."""

import json

from tools.check_page.actions import Check, expect, reload
from tools.check_page.devtools import Tab

NUM = 60_000
TEXTS = {
    "many lines": "*a*\n" * NUM,
    "many numbers in code": "```py\n" + "1 " * NUM,
    "many paragraphs": "a\n\n" * NUM,
    "many items": "- a\n" * NUM,
    "a table with too many columns": "|a" * NUM + "\n" + "|-" * NUM + "\n" + "|b" * NUM,
    "many short rows": "|a" * 256 + "\n" + "|-" * 256 + "\n" + "|\n" * (NUM // 4),
    "a rule that is none": "a|b\n|---" + " " * NUM + "x",
    "a fence that is none": "```" + " " * NUM + "`",
    "quotes in quotes": "> " * NUM + "a",
    "marks in marks": "*_" * NUM,
}
MOST_MS = 10_000.0
"""For a text: on two cores that have other work, each takes a second or less. Quadratic ones took minutes."""


async def hostile_replies_are_drawn_soon(tab: Tab) -> None:
    for name, text in TEXTS.items():
        script = f"""import('./page/chat/markdown_view.js').then(({{ MarkdownView }}) => {{
            const view = new MarkdownView(); const begin = performance.now();
            view.update({json.dumps(text)}); view.update({json.dumps(text + "b")});
            return [performance.now() - begin, view.element.textContent.length]; }})"""
        took_ms, length = await tab.run(script)
        expect(took_ms < MOST_MS, f"{name} took {took_ms:.0f} ms")
        expect(length, f"nothing is shown of {name}")


async def a_hostile_chat_does_not_stop_the_page(tab: Tab) -> None:
    messages = [{"role": "user", "text": "Hi"}, *({"role": "assistant", "text": text} for text in TEXTS.values())]
    await tab.run(f"localStorage.setItem('pipeline.conversation', {json.dumps(json.dumps(messages))})")
    await reload(tab)
    shown = await tab.run("document.querySelectorAll('.message.assistant').length")
    expect(shown == len(TEXTS), f"{shown} of {len(TEXTS)} replies are shown")


CHECKS: tuple[Check, ...] = (hostile_replies_are_drawn_soon, a_hostile_chat_does_not_stop_the_page)
