"""The sampling parameters that a model recommends: generation_config.json, as transformers writes it.

prepare copies the model's own recommendations into the prepared folder, also those of a .gguf file. The setting
`generation_config` selects them, those in another folder, or none. What a request gives always takes precedence; tokens
that the file excludes are not among what a request can give.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.files.regular_files import read_regular
from pipeline.runtime.messages import BEGIN

FILE = "generation_config.json"
MAX_BYTES = 16 * 1024**2


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of fields that a request doesn't give. `GenerationDefaults()` is neutral: all tokens may be sampled, and
    the context limits the output."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """Maximum number of output tokens, if they fit the context."""


class ExcludedTokens(msgspec.Struct, frozen=True):
    """What the model never samples. No field of a request changes it."""

    suppress_tokens: list[int] = []
    begin_suppress_tokens: list[int] = []
    """Not as the first token of the output."""
    bad_words_ids: list[list[int]] = []

    def runs(self, eos_ids: Collection[int]) -> list[list[int]]:
        """Runs of ids that the model never samples, in the form of `GenerationOptions.bad_words_ids`. As in
        transformers' `generate`, an id that ends the sequence is no bad word. Negative ids are left out."""
        words = (run for run in self.bad_words_ids if len(run) > 1 or run[0] not in eos_ids)
        runs = [*([one] for one in self.suppress_tokens), *words]
        begins = ([BEGIN, one] for one in self.begin_suppress_tokens if one >= 0)
        return [*(run for run in runs if min(run) >= 0), *begins]


class _File(msgspec.Struct):
    """The parameters in a generation_config.json, with the limits of a request's. Null is not given. Other keys are
    ignored, also do_sample, as in vLLM."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    bad_words_ids: list[Annotated[list[int], Meta(min_length=1)]] | None = None


EXCLUDED = ExcludedTokens.__struct_fields__
MAX_EXCLUDED_IDS = 32_768
"""Of these keys together: each sequence has them in its message to the executor."""
KEYS = _File.__struct_fields__
"""The keys that are used."""
SILENT = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "do_sample"),
    *("_from_model_config", "use_cache", "cache_implementation", "cache_config", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_legacy_cache"),
)
"""Keys that are used elsewhere, that docs/http/sampling.md says are ignored, or that change no text."""
NO_EFFECT: tuple[Any, ...] = (None, False, 0, 1, [], {}, "")
"""Values with which a parameter of transformers does nothing."""


def load(settings: Settings, model_dir: str | Path) -> GenerationDefaults:
    """The defaults for a prepared model with these settings. Raises UserError, naming the file and the key, if the file
    can't be used or the setting names a folder without one."""
    given = _given(settings, model_dir)
    return GenerationDefaults(**{name: value for name, value in given.items() if name not in EXCLUDED})


def excluded(settings: Settings, model_dir: str | Path) -> ExcludedTokens:
    """What a prepared model with these settings never samples. Raises UserError as `load` does."""
    given = _given(settings, model_dir)
    return ExcludedTokens(**{name: value for name, value in given.items() if name in EXCLUDED})


def _given(settings: Settings, model_dir: str | Path) -> dict[str, Any]:
    match settings.generation_config:
        case "none":
            return {}
        case "auto":
            path = Path(model_dir) / FILE
            return _read(path, f"model {settings.model}: {FILE}") if path.exists() else {}
        case folder:
            path = _in_folder(folder)
            return _read(path, str(path))


def names_folder(settings: Settings) -> bool:
    """Whether `generation_config` is a folder."""
    return settings.generation_config not in ("auto", "none")


def save(values: dict[str, Any], folder: Path) -> None:
    """Write the parameters among these values, if there are any. `load` checks them."""
    if given := {key: values[key] for key in KEYS if values.get(key) is not None}:
        (folder / FILE).write_bytes(msgspec.json.encode(given))


def unused(values: dict[str, Any]) -> list[str]:
    """A line about the keys of a model's file that transformers' `generate` uses, and this server doesn't."""
    names = [
        key
        for key, value in values.items()
        if key not in (*KEYS, *SILENT) and (value is True or value not in NO_EFFECT)
    ]
    if not names:
        return []
    shown = ", ".join(ascii(name[:40]) for name in names[:10]) + (" and others" if len(names) > 10 else "")
    return [f"{FILE}: {shown} {'is' if len(names) == 1 else 'are'} not used"]


def _in_folder(folder: str) -> Path:
    """The file in the folder that the setting names. Raises UserError if it is missing."""
    try:
        path = Path(folder).expanduser() / FILE
        if path.is_file():
            return path
        problem = f"{path} is missing"
    except (OSError, RuntimeError) as error:  # an invalid name; a user without home
        problem = str(error)
    raise UserError(
        f"generation_config {folder!r}: {problem}; use 'auto' for the model's own file, 'none' for neutral defaults, "
        f"or a folder with a {FILE}"
    )


def _read(path: Path, shown: str) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(read_regular(path, MAX_BYTES), type=_File)
    except OSError as error:
        raise UserError(f"{shown} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{shown} has no valid sampling parameters: {error}. Correct it, or set generation_config to 'none' or to "
            "a folder with another file"
        ) from error
    values = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"])
    num = sum(len(values.get(key, ())) for key in ("suppress_tokens", "begin_suppress_tokens"))
    num += sum(map(len, values.get("bad_words_ids", ())))
    if num > MAX_EXCLUDED_IDS:
        raise UserError(f"{shown}: {', '.join(EXCLUDED)} have {num} ids; at most {MAX_EXCLUDED_IDS} are supported")
    return values
