"""The keys of a .gguf file, read with errors that name file and key."""

from typing import Any

from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.file import GgufFile
from pipeline.stages.prepare.shape import check_ids
from pipeline.stages.prepare.sources.source import ModelError

MODEL_KEY = "tokenizer.ggml.model"
BOS_KEY, EOS_KEY = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
UNKNOWN_KEY = "tokenizer.ggml.unknown_token_id"
SEP_KEY = "tokenizer.ggml.seperator_token_id"
"""With llama.cpp's spelling."""
PAD_KEY, MASK_KEY = "tokenizer.ggml.padding_token_id", "tokenizer.ggml.mask_token_id"
DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {BOS_KEY: 1, EOS_KEY: 2, UNKNOWN_KEY: 0},
    "bert": {BOS_KEY: 101, UNKNOWN_KEY: 100, SEP_KEY: 102, PAD_KEY: 0, MASK_KEY: 103},
    "t5": {EOS_KEY: 1, UNKNOWN_KEY: 2, PAD_KEY: 0},
}
"""The ids of special tokens in files that don't name them, by the vocabulary's model, as in llama.cpp. For byte-level
vocabularies it takes 11, which is Falcon's end of text and a comma in most others: here they have no default."""


def shortest(value: float) -> float:
    """The shortest decimal that rounds to a float32, which files have: the original value."""
    import numpy as np

    with np.errstate(over="ignore"):  # overflow becomes infinity, which is refused later
        return float(str(np.float32(value)))


class Metadata:
    """A GGUF file's keys, read with errors that name file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._file = file
        self._asked: set[str] = set()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key, `default` if the file lacks it. Raises ModelError if it has another type."""
        self._asked.add(key)
        value = self._file.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise ModelError(f"{self.path}: {key} is {shown(value)}, not of type {kind}")
        return value

    def rest(self) -> list[str]:
        """The file's keys that nothing has asked for, in its order."""
        return [key for key in self._file.names if key not in self._asked]

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: the key {key} is missing")
        return value

    def of_all_layers(
        self,
        key: str,
        num_layers: int,
        default: int | None = None,
        *,
        skips_zeros: bool = False,
        may_differ: bool = False,
    ) -> int:
        """An integer that a file may have once for each layer, as in llama.cpp (`get_key_or_arr`). Raises ModelError
        if layers differ, with `skips_zeros` if those differ that are not 0, or if it is absent and has no default. If
        layers `may_differ`, that of the first one."""
        value = self.get(key, (int, list), default)
        if not isinstance(value, list):
            return int(self.need(key, int) if value is None else value)
        numbers = self.list_of(key, int)
        assert numbers is not None
        if len(numbers) != num_layers or any(isinstance(number, bool) for number in numbers):
            raise ModelError(f"{self.path}: {key} is {shown(value)}; it must be an integer, or one for each layer")
        numbers = [number for number in numbers if number or not skips_zeros] or numbers
        if len(set(numbers)) > 1 and not may_differ:
            raise ModelError(f"{self.path}: {key} is {shown(value)}: layers of different sizes are not supported")
        return int(numbers[0])

    def list_of(self, key: str, kind: type, length: int | None = None) -> "list[Any] | None":
        """The list under a key, None if absent. Raises ModelError unless it is `length` values of `kind`."""
        values: list[Any] | None = self.get(key, list)
        if values is None:
            return None
        if not all(isinstance(value, kind) for value in values):
            raise ModelError(f"{self.path}: {key} has values that are not of type {kind}")
        if length is not None and len(values) != length:
            raise ModelError(f"{self.path}: {key} has {len(values)} values; tokenizer.ggml.tokens has {length}")
        return values

    def refuse_unless(self, key: str, expected: Any, what: str) -> None:
        """Raises ModelError if the key is present with a value other than `expected`."""
        value = self.get(key, object, expected)
        if value != expected:
            raise ModelError(f"{self.path}: {key} is {shown(value)}: {what} is not supported")

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """The id under a key. If it is absent, the default of the vocabulary's model, or None. Raises ModelError unless
        it is below `num_tokens`; a default that isn't is None."""
        token_id: int | None = self.get(key, int)
        if token_id is not None:
            check_ids([token_id], num_tokens, self.path, key)
            return token_id
        default = DEFAULT_IDS.get(self.get(MODEL_KEY, str, ""), {}).get(key)
        return default if default is not None and default < num_tokens else None
