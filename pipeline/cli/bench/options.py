"""The options of `pipeline bench`, and the workload that they describe."""

import argparse
import secrets
from math import inf
from typing import Any, Literal

import msgspec

from pipeline.cli import option_types as types
from pipeline.cli.bench.arrivals import Arrivals
from pipeline.cli.bench.tasks import TASKS, TaskName
from pipeline.config.load import ConfigError


class Length(msgspec.Struct, frozen=True):
    """Length of a prompt or a prefix."""

    count: int
    unit: Literal["tokens", "words"]


class Workload(msgspec.Struct, frozen=True):
    """The requests of a run, and its duration."""

    concurrencies: tuple[int, ...]
    temperatures: tuple[float, ...]
    """Each concurrency is measured at each of them."""
    prompt: Length
    shared_prefix: Length
    """The prefix that all prompts share."""
    output_tokens: int
    duration_s: float
    """Of each level: one concurrency at one temperature."""
    num_requests: int | None
    num_warmups: int
    seed: int
    endpoint: str
    ignore_eos: bool
    task: TaskName | None = None
    """Prompts are of this task instead of common words, and have its length."""
    beam_width: int = 0
    """Each request is a beam search of this width; 0 for none."""
    arrivals: Arrivals | None = None
    """When requests arrive, beside `concurrencies` running streams; None if each stream sends one after the other."""


class Preset(msgspec.Struct, frozen=True):
    """A workload's defaults."""

    concurrency: tuple[int, ...]
    prompt: Length
    shared_prefix: Length
    output_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Greedy, and the default of OpenAI's API."""


NO_PREFIX = Length(0, "tokens")
DECODE = Preset((1, 8, 32), Length(128, "tokens"), NO_PREFIX, 128)
PREFILL = Preset((1,), Length(800, "words"), NO_PREFIX, 1, temperatures=(0.0,))
SHARED = Preset((16,), Length(650, "words"), Length(600, "words"), 64)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline bench`."""
    server = parser.add_argument_group("server")
    types.add_server(server, "by default %(default)s", default=types.DEFAULT_URL)
    server.add_argument(
        "--model",
        default="auto",
        help="model name; by default the first in the server's list. Requests use several with commas between them in "
        "turn. `adapters` are all of the server's LoRA adapters",
    )
    server.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="kind of request; by default %(default)s"
    )
    server.add_argument(
        "--timeout", type=types.duration, default=600.0, metavar="TIME", help="deadline of each request; by default 10m"
    )

    load = parser.add_argument_group("load", "Options that are not given come from the workload, `decode` by default.")
    presets = load.add_mutually_exclusive_group()
    _preset(presets, "--decode", DECODE, "128 tokens in and 128 out at concurrency 1, 8 and 32")
    _preset(presets, "--prefill", PREFILL, "prompts of 800 words and one token out, one at a time")
    _preset(presets, "--shared", SHARED, "16 streams that share a prefix of 600 words, 50 words of their own, 64 out")
    load.add_argument(
        "--concurrency", type=_concurrencies, metavar="N,N…", help="concurrent streams; measured one after the other"
    )
    load.add_argument(
        "--request-rate",
        type=_rate,
        metavar="R",
        help="open loop: R requests arrive a second, however long replies take, as `vllm bench serve` sends them; inf "
        "sends them all at once. --concurrency is then the number of streams that run meanwhile, by default 0: their "
        "ITL is reported too",
    )
    load.add_argument(
        "--burstiness",
        type=_positive_number,
        metavar="B",
        help="with --request-rate: shape of the gamma distribution of the gaps; by default 1, a Poisson process. Less "
        "is more bursty",
    )
    load.add_argument(
        "--max-concurrency",
        type=types.positive,
        metavar="N",
        help="with --request-rate: the most arriving requests that are open at any time; by default any number",
    )
    load.add_argument(
        "--temperature",
        type=_temperatures,
        metavar="T,T…",
        help="sampling temperatures; each concurrency is measured at each of them. By default 0,1: greedy, and the "
        "API's default; with --prefill 0",
    )
    prompt = load.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt-tokens", type=_tokens, dest="prompt", metavar="N", help="approximate length of a prompt, in tokens"
    )
    prompt.add_argument("--prompt-words", type=_words, dest="prompt", metavar="N", help="the same, in words")
    prefix = load.add_mutually_exclusive_group()
    prefix.add_argument(
        "--shared-prefix-tokens",
        type=_tokens,
        dest="prefix",
        metavar="N",
        help="length of the prefix that all prompts share, in tokens",
    )
    prefix.add_argument("--shared-prefix-words", type=_words, dest="prefix", metavar="N", help="the same, in words")
    load.add_argument(
        "--task",
        choices=list(TASKS),
        help="prompts of a real task instead of common words, for what depends on the text, such as speculative "
        "decoding: copy lines of a list, edit a file, write a function, answer a question",
    )
    load.add_argument(
        "--beam-width",
        type=types.positive,
        metavar="N",
        help="make each request a beam search with N beams. Its output comes at its end, and all beams count",
    )
    load.add_argument("--output-tokens", type=types.positive, metavar="N", help="output tokens of a request")
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate exactly that many tokens; --no-ignore-eos omits the field, which not every server supports",
    )
    load.add_argument(
        "--seed",
        type=types.natural,
        help="seed of the prompts; by default random, so that no prefix cache has them",
    )

    extent = parser.add_argument_group("extent")
    lasting = extent.add_mutually_exclusive_group()
    lasting.add_argument(
        "--duration",
        type=types.duration,
        default=10.0,
        metavar="TIME",
        help="duration of each level (one concurrency at one temperature) after its warm-up, such as 2m; by default "
        "10s, a minute for the six levels of --decode",
    )
    lasting.add_argument(
        "--num-requests",
        type=types.positive,
        metavar="N",
        help="number of requests of each level, instead of a duration",
    )
    extent.add_argument(
        "--warmup",
        type=types.natural,
        default=1,
        metavar="N",
        help="warm-up requests of each stream in each level; by default %(default)s",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the results as JSON to this file; - writes them to standard output, without the table",
    )
    plot = parser.add_argument_group("chart")
    plot.add_argument(
        "--plot",
        type=_svg_file,
        metavar="FILE.svg",
        help="draw throughput, inter-token latency and time to first token over concurrency",
    )
    plot.add_argument(
        "results",
        nargs="*",
        metavar="[NAME=]RESULT.json",
        help="with --plot: draw these results of --json in one chart, and measure nothing. By default a result has its "
        "file's name",
    )


def given_options(args: argparse.Namespace) -> list[str]:
    """The options whose values are not the defaults, by their names in `args`."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    defaults = vars(parser.parse_args([]))
    return [name for name, default in defaults.items() if getattr(args, name) != default]


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that the options describe."""
    preset: Preset = args.preset or DECODE
    arrivals = _arrivals_of(args)
    return Workload(
        concurrencies=args.concurrency or (preset.concurrency if arrivals is None else (0,)),
        temperatures=args.temperature or preset.temperatures,
        prompt=args.prompt or preset.prompt,
        shared_prefix=args.prefix or preset.shared_prefix,
        output_tokens=args.output_tokens or preset.output_tokens,
        duration_s=args.duration,
        num_requests=args.num_requests,
        num_warmups=args.warmup,
        seed=secrets.randbelow(2**32) if args.seed is None else args.seed,
        endpoint=args.endpoint,
        ignore_eos=args.ignore_eos,
        task=args.task,
        beam_width=args.beam_width or 0,
        arrivals=arrivals,
    )


def _arrivals_of(args: argparse.Namespace) -> Arrivals | None:
    """Raises ConfigError for options that only an open loop has, or does not have."""
    if args.request_rate is None:
        if 0 in (args.concurrency or ()):
            raise ConfigError(["--concurrency 0: needs --request-rate, or a whole number of at least 1"])
        for option, value in (("--burstiness", args.burstiness), ("--max-concurrency", args.max_concurrency)):
            if value is not None:
                raise ConfigError([f"{option} {value:g}: needs --request-rate"])
        return None
    if args.plot:
        raise ConfigError(["--plot: draws closed loops; --request-rate is an open one, so use --json"])
    return Arrivals(args.request_rate, args.burstiness or 1.0, args.max_concurrency)


def _preset(group: Any, option: str, preset: Preset, words: str) -> None:
    group.add_argument(option, dest="preset", action="store_const", const=preset, help=words)


def _tokens(text: str) -> Length:
    return Length(types.natural(text), "tokens")


def _words(text: str) -> Length:
    return Length(types.natural(text), "words")


def _svg_file(text: str) -> str:
    if not text.lower().endswith(".svg"):
        raise argparse.ArgumentTypeError(f"needs a file name that ends in .svg, got {text!r}")
    return text


def _concurrencies(text: str) -> tuple[int, ...]:
    return tuple(types.natural(part.strip()) for part in text.split(","))


def _rate(text: str) -> float:
    return inf if text == "inf" else _number(text, "needs a number above 0, or inf")


def _positive_number(text: str) -> float:
    return _number(text, "needs a number above 0")


def _number(text: str, needs: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{needs}, got {text!r}")
    return value


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(types.temperature(part.strip()) for part in text.split(","))
