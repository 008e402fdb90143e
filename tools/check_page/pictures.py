"""Pictures of both views, in both themes, on a desktop and on a phone."""

import asyncio
import json
from pathlib import Path

from tools.check_page import actions, images
from tools.check_page.devtools import Tab

WIDTHS = {"desktop": (1280, 860, 1.0), "phone": (390, 844, 2.0)}
QUESTIONS = (
    "Write a Python function that reverses the words of a sentence.",
    "What is the capital of Greece?",
)
NUM_LOADS = 8


async def save(tab: Tab, url: str, folder: Path) -> None:
    """Chat with the server at `url`, and save the pictures to `folder`."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await tab.resize(*WIDTHS["desktop"])
    await tab.set_media()
    await tab.open(f"{url}/")
    await actions.ready(tab)
    await actions.settings(tab, temperature="0.2", max_tokens="220", seed="3")
    await _both(tab, folder, "welcome")
    for question in QUESTIONS:
        await actions.ask(tab, question)
    await tab.run("document.querySelectorAll('.timings')[1].open = true; document.activeElement.blur()")
    await _both(tab, folder, "chat")
    await tab.click(".toggle[aria-controls=settings]")
    await _both(tab, folder, "settings")
    await tab.run("document.querySelector('.toggle[aria-controls=settings]').click()")
    await tab.run("document.querySelector('.toggle[aria-pressed]').click()")
    await actions.ask(tab, "Name three colours of the sky.")
    await tab.until("document.querySelector('.message:last-child .tokens')")
    await tab.run("document.querySelector('.message:last-child .tokens').focus()")
    await tab.press("Home")
    await tab.press("ArrowRight")
    await _both(tab, folder, "tokens")
    await _load(tab)
    await tab.run("location.hash = '#pipeline'")
    await tab.until("document.querySelector('.requests li:not(.open)')")
    await _both(tab, folder, "stages")
    await tab.until("!document.querySelector('.requests li.open')", actions.SLOW_S)
    await tab.click(".requests li:nth-child(2) button")
    await tab.run("document.querySelector('#pipeline-view').scrollTop = 400")
    await _both(tab, folder, "request")


async def save_images(tab: Tab, url: str, folder: Path) -> None:
    """Send images to the server at `url`, and save the pictures to `folder`."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await tab.resize(*WIDTHS["desktop"])
    await tab.open(f"{url}/")
    await actions.ready(tab)
    await actions.settings(tab, temperature="0", max_tokens="8")
    await tab.until("document.querySelector('.attach button')")
    await images.choose(tab, "a_photo.png")
    await tab.until(f"{images.SHOWN}.length === 1")
    await actions.send(tab, "What is in this picture?")
    await tab.until(f"{actions.NUM_REPLIES} === 1 && {actions.IS_IDLE}", actions.SLOW_S)
    for name in ("a.png", "another_photo_with_a_long_name_of_a_camera_20261130_231502.png"):
        await images.choose(tab, name)
    await tab.until(f"{images.SHOWN}.length === 2")
    await images.choose(tab, "broken.png", "YWJj")
    await tab.until("document.querySelector('.files .refused')")
    await _both(tab, folder, "images")


async def _load(tab: Tab) -> None:
    """Requests of several lengths, which the page does not wait for."""
    body = json.dumps({"max_tokens": 400, "ignore_eos": True})
    await tab.run(
        f"for (let i = 0; i < {NUM_LOADS}; i += 1) void fetch('v1/completions', {{method: 'POST', "
        "headers: {'Content-Type': 'application/json'}, body: JSON.stringify({"
        f"...{body}, model: document.querySelector('#model').textContent, "
        "max_tokens: 60 + 240 * i, prompt: 'A story about ' + ['a fox', 'the sea', 'a clock'][i % 3]})}"
        ").then(one => one.text())"
    )


async def _both(tab: Tab, folder: Path, name: str) -> None:
    for width, size in WIDTHS.items():
        await tab.resize(*size)
        await tab.call("Emulation.setTouchEmulationEnabled", enabled=width == "phone")
        for scheme in ("light", "dark"):
            await tab.set_media(scheme=scheme)
            await tab.run("new Promise(done => setTimeout(done, 250))")  # transitions
            picture = await tab.screenshot()
            await asyncio.to_thread((folder / f"{name}-{width}-{scheme}.png").write_bytes, picture)
    await tab.resize(*WIDTHS["desktop"])
    await tab.set_media()
    await tab.call("Emulation.setTouchEmulationEnabled", enabled=False)
