"""Prompts of random lengths in the server's tokens, and a closed loop of streams that send them.

Requests go to /v1/completions, because a chat template would give all prompts a common prefix.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.cli import option_types as types
from pipeline.cli.bench import words
from pipeline.cli.bench.client import BenchClient, RequestResult, open_session
from pipeline.cli.bench.loop import ClosedLoop, Level, LoadPlan
from pipeline.cli.bench.measure import Summary, summarize

ENDPOINT = "completions"
TIMEOUT_S = 600.0
CALIBRATION_WORDS = (16, 116)


class Span(msgspec.Struct, frozen=True):
    """A uniform distribution of whole numbers from `least` to `most`."""

    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2


def span(text: str) -> Span:
    """The value of an option such as 700-1200. Raises ArgumentTypeError."""
    least, dash, most = text.partition("-")
    found = Span(types.positive(least), types.positive(most if dash else least))
    if found.least > found.most:
        raise argparse.ArgumentTypeError(f"needs the smaller number first, got {text!r}")
    return found


class BenchmarkLoad(msgspec.Struct, frozen=True):
    """The requests of a closed loop, with lengths in tokens. No two prompts share a prefix."""

    num_streams: int
    prompt: Span
    output: Span
    seconds: float
    seed: str
    options: dict[str, Any] = {}
    """Further fields of each request."""

    @property
    def mean_tokens(self) -> float:
        """Tokens of an average request when it ends."""
        return self.prompt.mean + self.output.mean


class BenchmarkRequest(msgspec.Struct, frozen=True):
    """One request."""

    prompt: str
    max_tokens: int

    def options(self) -> dict[str, Any]:
        return {"temperature": 0, "ignore_eos": True, "max_tokens": self.max_tokens}


def ask_of(load: BenchmarkLoad, name: str, calibration: words.Calibration, part: float = 1.0) -> BenchmarkRequest:
    """The request with this name; it depends only on the load and the name. `part` (0 to 1] shortens its output."""
    rng = random.Random(f"{load.seed}/{name}")
    num_words = calibration.words_for(load.prompt.draw(rng))
    num_output = load.output.draw(rng)
    return BenchmarkRequest(words.text(f"{load.seed}/{name}/words", num_words), max(1, round(part * num_output)))


async def calibrate(client: BenchClient, seed: str) -> words.Calibration:
    """The server's tokens per word. Raises ServerError."""
    tokens = [
        await client.count_tokens(words.text(f"{seed}/calibration/{count}", count), {"temperature": 0})
        for count in CALIBRATION_WORDS
    ]
    return words.Calibration.between(CALIBRATION_WORDS, (tokens[0], tokens[1]))


async def closed_loop(url: str, load: BenchmarkLoad, begun: Callable[[], None] = lambda: None) -> Summary:
    """Run a load and measure it like `pipeline bench`; pipeline.cli.bench defines the window. `begun` is called after
    the sizing requests. Raises ServerError."""
    return summarize(await closed_loop_level(url, load, begun))


async def closed_loop_level(url: str, load: BenchmarkLoad, begun: Callable[[], None] = lambda: None) -> Level:
    """The same, without the statistics."""
    async with open_session(None, TIMEOUT_S) as session:
        client = BenchClient(session, url, "auto", ENDPOINT)
        await client.find_model()
        calibration = await calibrate(client, load.seed)
        begun()

        async def generate(name: str, part: float) -> RequestResult:
            ask = ask_of(load, name, calibration, part)
            return await client.generate(ask.prompt, ask.options() | load.options)

        return await ClosedLoop(LoadPlan(load.num_streams, load.seconds), generate, lambda loop: None).run()
