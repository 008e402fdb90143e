"""vLLM's options of `pipeline serve`: those that set one of Pipeline's settings, and those that are refused with the
reason."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from pipeline.config.vllm_names import AS_SETTINGS, ENABLE_LORA, UNSUPPORTED_OPTIONS, converted

_DEST = "vllm "
ONE_NAME = "--served-model-name takes one name"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the options. `given` returns what they set."""
    group = parser.add_argument_group(
        "options of vLLM", "each sets one of the settings; the others are refused by name"
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="an API key that clients need; can be repeated. Better: gateway.api_keys_file or PIPELINE_API_KEYS, which "
        "other users of this machine can't see",
    )
    for flag, setting in AS_SETTINGS.items():
        key, _, value = setting.partition("=")
        if not value.isupper():
            group.add_argument(flag, dest=_DEST + flag, action="store_const", const=value, help=f"{key} = {value}")
        else:
            convert = _converter(flag, value)
            several = "+" if value == "MODULES" else None
            group.add_argument(flag, dest=_DEST + flag, type=convert, metavar=value, help=key, nargs=several)
    group.add_argument(ENABLE_LORA, action="store_true", help="no setting: --lora-modules and lora.* enable adapters")
    for flag, unsupported in UNSUPPORTED_OPTIONS.items():
        num_args = 1 if unsupported.ignored_arguments else "*"
        group.add_argument(flag, action=_UnsupportedOption, nargs=num_args, default=None, help=argparse.SUPPRESS)


def given(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The settings that the options give: how the user wrote each, and KEY=VALUE."""
    found = []
    for flag, setting in AS_SETTINGS.items():
        if (argument := getattr(args, _DEST + flag, None)) is not None:
            value = "{" + ", ".join(argument) + "}" if isinstance(argument, list) else argument
            key, _, form = setting.partition("=")
            found.append((f"{flag} {value}" if form.isupper() else flag, f"{key}={value}"))
    return found


def dashed(words: Sequence[str]) -> list[str]:
    """The words of a command line with vLLM's other spelling of options, `--max_model_len`, replaced."""
    return [_dashed(word) if word.startswith("--") else word for word in words]


def hint(words: Iterable[str], line: Sequence[str] = ()) -> str:
    """A hint for unknown words of a command `line` that vLLM takes; empty for others."""
    words = list(words)
    if is_second_name(words, line):
        return f"; {ONE_NAME}"
    names = [_dashed(word).partition("=")[0] for word in words if word.startswith("--")]
    settings = dict.fromkeys(AS_SETTINGS[name] for name in names if name in AS_SETTINGS)
    return f"; did you mean {' '.join(f'--set {setting}' for setting in settings)}?" if settings else ""


def is_second_name(words: Sequence[str], line: Sequence[str]) -> bool:
    """Whether one of these words is a second name after --served-model-name, of which vLLM takes several."""
    flag = "--served-model-name"
    indices = [index + (word == flag) for index, word in enumerate(line) if word == flag or word.startswith(f"{flag}=")]
    return any(word in words for index in indices for word in line[index + 1 : index + 2])


def gpu_memory_share(args: argparse.Namespace) -> float | None:
    """The value of --gpu-memory-utilization; None if it is not given. A warning about settings without effect passes
    over values that are the default."""
    given = getattr(args, f"{_DEST}--gpu-memory-utilization", None)
    return None if given is None else float(given)


def gives_name(args: argparse.Namespace) -> bool:
    """Whether --served-model-name is given."""
    return getattr(args, f"{_DEST}--served-model-name", None) is not None


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


class _UnsupportedOption(argparse.Action):
    """Reports an option that has no meaning here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        unsupported = UNSUPPORTED_OPTIONS[option_string]
        if not (values and set(values) <= set(unsupported.ignored_arguments)):
            parser.error(f"{option_string} of vLLM is not supported: {unsupported.advice}")


def _converter(flag: str, form: str) -> Callable[[str], str]:
    """Converts an option's argument to the value of its setting. Raises ArgumentTypeError."""

    def convert(text: str) -> str:
        if form == "MODULES":
            return _module(text)
        try:
            return converted(flag, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _module(text: str) -> str:
    """An entry of lora.adapters, in TOML, of vLLM's NAME=PATH or {"name": NAME, "path": PATH}. Raises
    ArgumentTypeError."""
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        try:
            given = msgspec.json.decode(text, type=dict[str, str | None])
        except msgspec.DecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not JSON with a name and a path") from error
        name, path, equals = given.get("name") or "", given.get("path") or "", "="
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"needs NAME=PATH, got {text!r}")
    return f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(path, ensure_ascii=False)}"
