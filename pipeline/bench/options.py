"""What can be asked of a measurement."""

import argparse
import re
import secrets
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}


class Length(msgspec.Struct, frozen=True):
    """Of a prompt."""

    count: int
    unit: Literal["tokens", "words"]


class Workload(msgspec.Struct, frozen=True):
    """What is sent, and how long for."""

    concurrencies: tuple[int, ...]
    prompt: Length
    shared_prefix: Length
    """The part of the prompt that all of them have in common."""
    output_tokens: int
    duration_s: float
    num_requests: int | None
    num_warmups: int
    seed: int
    endpoint: str
    ignore_eos: bool
    temperature: float


class Preset(msgspec.Struct, frozen=True):
    """A workload's defaults."""

    concurrency: tuple[int, ...]
    prompt: Length
    shared_prefix: Length
    output_tokens: int


NO_PREFIX = Length(0, "tokens")
DECODE = Preset((1, 8, 32), Length(128, "tokens"), NO_PREFIX, 128)
PREFILL = Preset((1,), Length(800, "words"), NO_PREFIX, 1)
SHARED = Preset((16,), Length(650, "words"), Length(600, "words"), 64)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline bench`."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", type=_url, default="http://127.0.0.1:8000", help="where it is; by default %(default)s")
    server.add_argument("--model", default="auto", help="name to ask for; by default the first that it lists")
    server.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="kind of request; by default %(default)s"
    )
    server.add_argument("--api-key", type=_api_key, help="sent as a bearer token")
    server.add_argument(
        "--timeout", type=_duration, default=600.0, metavar="TIME", help="deadline of each request; by default 10m"
    )

    load = parser.add_argument_group("load", "Options that are not given come from the workload, `decode` by default.")
    presets = load.add_mutually_exclusive_group()
    _preset(presets, "--decode", DECODE, "128 tokens in and 128 out at concurrency 1, 8 and 32")
    _preset(presets, "--prefill", PREFILL, "prompts of 800 words and one token out, one at a time")
    _preset(presets, "--shared", SHARED, "16 streams that share a prefix of 600 words, 50 words of their own, 64 out")
    load.add_argument("--concurrency", type=_concurrencies, metavar="N,N…", help="streams at once, one level for each")
    prompt = load.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-tokens", type=_tokens, dest="prompt", metavar="N", help="length of a prompt, about")
    prompt.add_argument("--prompt-words", type=_words, dest="prompt", metavar="N", help="the same, in words")
    prefix = load.add_mutually_exclusive_group()
    prefix.add_argument(
        "--shared-prefix-tokens", type=_tokens, dest="prefix", metavar="N", help="part of it that all prompts share"
    )
    prefix.add_argument("--shared-prefix-words", type=_words, dest="prefix", metavar="N", help="the same, in words")
    load.add_argument("--output-tokens", type=_positive, metavar="N", help="tokens to ask for")
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly so many tokens; not every server knows this field, and --no-ignore-eos leaves it out",
    )
    load.add_argument(
        "--temperature", type=_temperature, default=0.0, help="of sampling; by default 0, which is greedy"
    )
    load.add_argument(
        "--seed", type=_natural, help="of the prompts; by default drawn anew each time, so that no cache knows them"
    )

    extent = parser.add_argument_group("extent")
    lasting = extent.add_mutually_exclusive_group()
    lasting.add_argument(
        "--duration", type=_duration, default=20.0, metavar="TIME", help="of each level, as 2m; by default 20s"
    )
    lasting.add_argument("--num-requests", type=_positive, metavar="N", help="requests of each level instead")
    extent.add_argument(
        "--warmup",
        type=_natural,
        default=1,
        metavar="N",
        help="requests that each stream makes before it counts; by default %(default)s",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write all numbers there; - is standard output, without the table"
    )


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that the options make."""
    preset: Preset = args.preset or DECODE
    return Workload(
        concurrencies=args.concurrency or preset.concurrency,
        prompt=args.prompt or preset.prompt,
        shared_prefix=args.prefix or preset.shared_prefix,
        output_tokens=args.output_tokens or preset.output_tokens,
        duration_s=args.duration,
        num_requests=args.num_requests,
        num_warmups=args.warmup,
        seed=secrets.randbelow(2**32) if args.seed is None else args.seed,
        endpoint=args.endpoint,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
    )


def _preset(group: Any, option: str, preset: Preset, words: str) -> None:
    group.add_argument(option, dest="preset", action="store_const", const=preset, help=words)


# argparse shows an ArgumentTypeError's words after the name of the option.


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"needs http:// or https:// in front, got {text!r}")
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that don't match, or a port that is no port
        is_whole = False
    if not is_whole or not text.isprintable():
        raise argparse.ArgumentTypeError(f"needs an address such as http://127.0.0.1:8000, got {text!r}")
    return text


def _api_key(text: str) -> str:
    if not text.isprintable():
        # Not shown: a key is a secret.
        raise argparse.ArgumentTypeError("has a line break or another character that a header can't hold")
    return text


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    return _whole(text, 0)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _tokens(text: str) -> Length:
    return Length(_natural(text), "tokens")


def _words(text: str) -> Length:
    return Length(_natural(text), "words")


def _concurrencies(text: str) -> tuple[int, ...]:
    return tuple(_positive(part.strip()) for part in text.split(","))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"needs a number from 0 to 2, got {text!r}")
    return value


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"needs a time such as 20s or 2m, got {text!r}")
    return seconds
