"""Checks the web page in a headless Chromium, against a real server with the default model.

    python -m tools.check_page                        all checks, about a minute
    python -m tools.check_page --only phone           those whose name contains a word
    python -m tools.check_page --screenshots shots    also save pictures of both views, in both themes and widths

It needs Chromium or Chrome (on Debian: apt install chromium). The page must write no error to the console, violate its
Content-Security-Policy nowhere, and ask no other server for anything. The exit code is 1 if a check fails.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

from tests.e2e.server import Server
from tools.check_page import actions, checks, hostile, images, pictures, reasoning
from tools.check_page.devtools import PageError, Tab, browser, find_browser

KEY = "sk-of-the-page-check"
EXPECTED = (AssertionError, PageError, TimeoutError)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools.check_page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--browser", default=find_browser(), metavar="PATH", help="Chromium or Chrome")
    parser.add_argument("--only", default="", metavar="WORD", help="checks whose name contains it")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="save pictures there")
    args = parser.parse_args()
    if args.browser is None:
        parser.error("no Chromium is found: install it (on Debian: apt install chromium), or name it by --browser")
    try:
        return asyncio.run(run(args.browser, args.only, args.screenshots))
    except EXPECTED as error:
        print(f"check_page: error: {error}", file=sys.stderr)
        return 1


async def run(program: str, only: str, folder: Path | None) -> int:
    failed = 0
    with Server() as server:
        async with browser(program) as chromium:
            if chosen := [check for check in (*checks.CHECKS, *hostile.CHECKS) if only in check.__name__]:
                tab = await chromium.tab()
                await tab.resize(1280, 820)
                await tab.set_media()
                await tab.open(f"{server.url}/")
                await actions.ready(tab)
                for check in chosen:
                    failed += await passes(tab, server.url, check.__name__, check(tab)) is False
            if folder is not None:
                await pictures.save(await chromium.tab(), server.url, folder)
    if only in checks.a_server_with_keys_asks_for_one.__name__:
        with Server(environ={"PIPELINE_API_KEYS": KEY}) as server:
            async with browser(program) as chromium:
                tab = await chromium.tab()
                await tab.open(f"{server.url}/")
                with_key = checks.a_server_with_keys_asks_for_one
                failed += await passes(tab, server.url, with_key.__name__, with_key(tab, KEY)) is False
    if (chosen := [check for check in images.CHECKS if only in check.__name__]) or folder is not None:
        with images.serving() as server:
            async with browser(program) as chromium:
                tab = await chromium.tab()
                await tab.resize(1280, 820)
                await tab.open(f"{server.url}/")
                await actions.ready(tab)
                for check in chosen:
                    failed += await passes(tab, server.url, check.__name__, check(tab)) is False
                if folder is not None:
                    await pictures.save_images(await chromium.tab(), server.url, folder)
    if chosen := [check for check in reasoning.CHECKS if only in check.__name__]:
        with reasoning.serving() as server:
            async with browser(program) as chromium:
                tab = await chromium.tab()
                await tab.open(f"{server.url}/")
                await actions.ready(tab)
                for check in chosen:
                    failed += await passes(tab, server.url, check.__name__, check(tab)) is False
    chosen = [one for one in (checks.a_short_context_needs_no_setting,) if only in one.__name__]
    died = checks.a_server_that_has_died_is_not_shown_alive
    if chosen or only in died.__name__:
        with Server("max_model_len=256") as server:
            async with browser(program) as chromium:
                tab = await chromium.tab()
                await tab.open(f"{server.url}/")
                await actions.ready(tab)
                for check in chosen:
                    failed += await passes(tab, server.url, check.__name__, check(tab)) is False
                if only in died.__name__:
                    failed += await passes(tab, server.url, died.__name__, died(tab, server.stop)) is False
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


async def passes(tab: Tab, url: str, name: str, check: Awaitable[None]) -> bool:
    """Run a check, and print its result."""
    begin_s = time.monotonic()
    try:
        await check
        foreign = {one for one in tab.urls if not one.startswith((url, "data:", "blob:", "about:"))}
        actions.expect(not foreign, f"requests to other servers: {foreign}")
        actions.expect(not tab.problems, f"errors in the console: {tab.problems}")
    except EXPECTED as error:
        tab.problems.clear()
        print(f"FAILED {name.replace('_', ' ')}: {error}", flush=True)
        return False
    print(f"ok     {name.replace('_', ' ')} ({time.monotonic() - begin_s:.1f} s)", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
