"""A small client of Chromium's DevTools protocol, over aiohttp's WebSocket."""

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S = 90.0
ANSWER_S = 90.0
POLL_S = 0.05

Json = dict[str, Any]


class PageError(Exception):
    """A script in the page failed, or a condition did not come true in time."""


def find_browser() -> str | None:
    """The first of BROWSERS that is on the PATH."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        """Exceptions, errors in the console, and violations of the Content-Security-Policy."""
        self.urls: list[str] = []
        """Of all requests."""

    async def call(self, method: str, **params: Any) -> Json:
        return await self._browser.call(method, self._session, **params)

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited. Raises PageError."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if details := answer.get("exceptionDetails"):
            raise PageError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true. Raises PageError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not await self._holds(condition):
            if loop.time() > end:
                raise PageError(f"not within {timeout_s:g} s: {condition}")
            await asyncio.sleep(POLL_S)

    async def _holds(self, condition: str) -> bool:
        try:
            return bool(await self.run(f"Boolean({condition})"))
        except PageError as error:
            if "navigated" in str(error):  # a reload has begun since
                return False
            raise

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    async def set_media(self, *, scheme: str = "light", motion: str = "no-preference") -> None:
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def type(self, text: str) -> None:
        """Into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key by its name, such as Enter."""
        code = {
            "Enter": 13,
            "Escape": 27,
            "ArrowRight": 39,
            "ArrowLeft": 37,
            "Tab": 9,
            "End": 35,
            "Home": 36,
            "ArrowUp": 38,
        }[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def click(self, selector: str) -> None:
        """Click in the middle of an element, as a pointer does. Raises PageError if something covers it."""
        script = f"""(() => {{ const node = document.querySelector({selector!r});
            node.scrollIntoView({{block: "nearest"}});
            const box = node.getBoundingClientRect(); const at = [box.left + box.width / 2, box.top + box.height / 2];
            const top = document.elementFromPoint(...at);
            return [...at, node.contains(top) || top?.contains(node) || false]; }})()"""
        x, y, is_seen = await self.run(script)
        if not is_seen:
            raise PageError(f"{selector} is covered by something")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def hover(self, selector: str) -> None:
        script = f"""(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2]; }})()"""
        x, y = await self.run(script)
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self) -> bytes:
        """A PNG of what the window shows."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    def handle(self, method: str, params: Json) -> None:
        """An event of the page."""
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([one.get("value", one.get("description")) for one in params["args"]]))
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])


class Browser:
    """A connection to a running Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self._tabs: dict[str, Tab] = {}

    async def call(self, method: str, session: str = "", **params: Any) -> Json:
        """Call a method and wait for its answer. Raises PageError."""
        number = next(self._ids)
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        message: Json = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(ANSWER_S):
            answer = await future
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        result: Json = answer["result"]
        return result

    async def tab(self) -> Tab:
        """A new page with storage of its own."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        answer = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, answer["sessionId"])
        self._tabs[answer["sessionId"]] = tab
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        return tab

    async def read(self) -> None:
        """Handle messages until the connection closes."""
        async for message in self._socket:
            data: Json = message.json()
            if (future := self._answers.pop(data.get("id", 0), None)) is not None:
                if not future.done():
                    future.set_result(data)
            elif tab := self._tabs.get(data.get("sessionId", "")):
                tab.handle(data["method"], data["params"])


@contextlib.asynccontextmanager
async def browser(program: str) -> AsyncIterator[Browser]:
    """Start a headless Chromium with a profile of its own, and end it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--no-sandbox",  # as root, Chromium does not start with it
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S):
                url = await _address(process)
            async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
                found = Browser(socket)
                reader = asyncio.create_task(found.read())
                try:
                    yield found
                finally:
                    reader.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    lines = []
    async for line in process.stderr:
        words = line.decode(errors="replace")
        if words.startswith("DevTools listening on "):
            return words.rsplit(" ", 1)[1].strip()
        lines.append(words)
    raise PageError("the browser did not start:\n" + "".join(lines[-20:]))
