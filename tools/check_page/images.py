"""Checks of images: a server whose tiny model takes them, and says random words about them."""

import base64
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.e2e.models.test_images import make_folder, png, rules
from tests.e2e.server import Server
from tools.check_page.actions import IS_IDLE, LAST, NUM_REPLIES, SLOW_S, Check, expect, send, settings
from tools.check_page.devtools import Tab

PICTURE = base64.b64encode(png(1, (320, 200))).decode()
NUM_FILES = "document.querySelectorAll('.composer .files li').length"
SHOWN = """[...document.querySelectorAll('.composer .files img')].map(one => one.complete && one.naturalWidth)"""


@contextmanager
def serving() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        _, source = make_folder(Path(folder))
        with Server(*rules(source), "max_model_len=1000") as server:
            yield server


def _files(name: str = "a.png", data: str = PICTURE, kind: str = "image/png") -> str:
    """JavaScript of a DataTransfer with one file."""
    return f"""(() => {{ const bytes = Uint8Array.from(atob('{data}'), one => one.charCodeAt(0));
        const given = new DataTransfer(); given.items.add(new File([bytes], '{name}', {{type: '{kind}'}}));
        return given; }})()"""


async def choose(tab: Tab, name: str = "a.png", data: str = PICTURE, kind: str = "image/png") -> None:
    """Choose a file, as with the button."""
    await tab.run(
        f"""(() => {{ const input = document.querySelector('.attach input');
        input.files = {_files(name, data, kind)}.files; input.dispatchEvent(new Event('change')); }})()"""
    )


async def _drag(tab: Tab, kind: str, name: str = "a.png", media_type: str = "image/png") -> bool:
    """Drag a file over the conversation, or drop it there. Returns whether the page handles it."""
    event = (
        f"new DragEvent('{kind}', {{dataTransfer: {_files(name, kind=media_type)}, bubbles: true, cancelable: true}})"
    )
    handled: bool = await tab.run(f"!document.querySelector('.scroller').dispatchEvent({event})")
    return handled


async def _paste(tab: Tab, name: str = "a.png", media_type: str = "image/png") -> bool:
    data = f"{{clipboardData: {_files(name, kind=media_type)}, bubbles: true, cancelable: true}}"
    handled: bool = await tab.run(
        f"!document.querySelector('#message').dispatchEvent(new ClipboardEvent('paste', {data}))"
    )
    return handled


async def a_picture_is_chosen_dropped_and_pasted(tab: Tab) -> None:
    await settings(tab, temperature="0", max_tokens="4")
    await tab.until("document.querySelector('.attach button')")
    await choose(tab)
    await tab.until(f"{SHOWN}.join() === '320'")
    expect(await _drag(tab, "dragover", "b.png"), "a file that is dragged is not seen")
    expect(await tab.run("!!document.querySelector('.drop .composer')"), "nothing says where it can be dropped")
    expect(await _drag(tab, "drop", "b.png"), "a drop opens the file in place of the page")
    await tab.until(f"{SHOWN}.join() === '320,320' && !document.querySelector('.drop')")
    expect(await _paste(tab, "c.png"), "a picture is not pasted")
    await tab.until(f"{SHOWN}.join() === '320,320,320'")
    words = await tab.run("[...document.querySelectorAll('.files li span')].map(one => one.textContent[0]).join('')")
    expect(words == "abc", f"the files are {words}")


async def a_thumbnail_can_be_removed(tab: Tab) -> None:
    """After the check before."""
    await tab.click(".files li:nth-child(2) button")
    await tab.until(f"{NUM_FILES} === 2")
    await send(tab, "Which?")
    await tab.until(f"{NUM_REPLIES} === 1 && {IS_IDLE}", SLOW_S)
    expect(not await tab.run(f"!!{LAST}.querySelector('.failure')"), "the reply failed")
    expect(await tab.run("document.querySelectorAll('.message.user img').length") == 2, "the message has no two images")
    expect(await tab.run(NUM_FILES) == 0, "the files stay behind their message")


async def a_message_waits_for_its_picture(tab: Tab) -> None:
    before = await tab.run(NUM_REPLIES)
    await choose(tab)
    await send(tab, "And this?")  # the server has not answered yet
    await tab.until(f"{NUM_REPLIES} === {before + 1} && {IS_IDLE}", SLOW_S)
    expect(await tab.run("document.querySelectorAll('.message.user:nth-last-child(2) img').length") == 1, "it is lost")


async def only_pictures_are_taken(tab: Tab) -> None:
    expect(await _drag(tab, "drop", "a.pdf", "application/pdf"), "a drop opens the file in place of the page")
    expect(not await _paste(tab, "a.pdf", "application/pdf"), "a paste of other files is taken")
    expect(await tab.run(NUM_FILES) == 0, "a file is taken that is no picture")
    await choose(tab, "a.png", base64.b64encode(b"no picture").decode())
    await tab.until("document.querySelector('.files .refused')")
    words = await tab.run("document.querySelector('.files .refused').textContent")
    expect("No image attached." in words and "in no format" in words, f"the page says {words!r}")
    await tab.click(".files .refused button")
    tab.problems = [one for one in tab.problems if "400 (Bad Request)" not in one]


async def a_large_photo_is_sent_smaller(tab: Tab) -> None:
    """A photo of a camera has more bytes than a body may have."""
    noise = random.Random(1).randbytes(1600 * 1200 * 3)
    file = BytesIO()
    Image.frombytes("RGB", (1600, 1200), noise).resize((3200, 2400)).save(file, "JPEG", quality=97)
    data = base64.b64encode(file.getvalue()).decode()
    expect(len(data) > 4 * 1024**2, f"the photo has only {len(data)} characters")
    await choose(tab, "photo.jpg", data, "image/jpeg")
    await tab.until(f"{SHOWN}.join() === '3200'", SLOW_S)
    expect(not await tab.run("!!document.querySelector('.files .refused')"), "it is refused")
    await tab.click(".files li button")


async def a_phone_has_a_camera(tab: Tab) -> None:
    is_shown = "getComputedStyle(document.querySelector('.attach .camera')).display !== 'none'"
    expect(not await tab.run(is_shown), "a desktop has a button for its camera")
    await tab.resize(390, 844)
    await tab.call("Emulation.setTouchEmulationEnabled", enabled=True)
    await tab.until(is_shown)
    capture = await tab.run("document.querySelector('.camera input').getAttribute('capture')")
    expect(capture == "environment", "it opens no camera")
    await choose(tab, "a_photo_with_a_long_name_" + 8 * "of_a_camera_" + ".png")
    await tab.until(f"{SHOWN}.join() === '320'")
    expect(await tab.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390], "it is too wide")
    small = """[...document.querySelectorAll('.composer button')].filter(one => one.offsetParent)
        .map(one => one.getBoundingClientRect()).filter(one => one.width < 24 || one.height < 24).length"""
    expect(await tab.run(small) == 0, "a button is too small for a finger")
    await tab.click(".files li button")
    await tab.call("Emulation.setTouchEmulationEnabled", enabled=False)
    await tab.resize(1280, 820)


CHECKS: tuple[Check, ...] = (
    a_picture_is_chosen_dropped_and_pasted,
    a_thumbnail_can_be_removed,
    a_message_waits_for_its_picture,
    only_pictures_are_taken,
    a_large_photo_is_sent_smaller,
    a_phone_has_a_camera,
)
"""In this order: each goes on where the one before has ended."""
