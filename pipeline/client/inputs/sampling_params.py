"""Sampling parameters, with the names, meanings and defaults of vLLM."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pipeline.client.inputs.checks import MAX_INT32, check_integer, check_number, check_side, shown
from pipeline.client.inputs.structured_params import StructuredOutputsParams

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_LENGTH_PENALTY = 10.0
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_CHARS = 256
"""Maximum length of a stop string, and of an entry in bad_words."""
MOST = {
    "n": 65536,
    "best_of": 65536,
    "logprobs": 1024,
    "stop_strings": 4096,
    "stop_token_ids": 4096,
    "logit_bias": 65536,
    "bad_words": 65536,
}
"""Upper limits of every server. A server's settings `limits.*` are lower by default."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled and where text ends. The constructor raises TypeError or ValueError that names the invalid
    field and the valid values."""

    n: int = 1
    """Number of sequences to return for one prompt."""
    best_of: int | None = None
    """Number of sequences to generate. The n with the highest log probability per output id are returned when all have
    ended, the best first. None: n."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    seed: int | None = None
    """A 64-bit integer. With None, the server chooses one."""
    max_tokens: int | None = 16
    """Maximum number of output ids of each sequence. None: as many as fit the context, up to the model's
    max_new_tokens if its generation_config.json has one."""
    stop: str | list[str] | None = None
    """Strings that end the text; stored as a list."""
    stop_token_ids: list[int] | None = None
    """Ids that end a sequence, besides the model's own; stored as a list."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True
    """No effect: no supported tokenizer adds spaces between special tokens."""
    repetition_penalty: float = 1.0
    """0.01 to 100. Above 1 makes ids of the prompt and the output less likely."""
    presence_penalty: float = 0.0
    """-2 to 2. Above 0 makes ids of the output less likely."""
    frequency_penalty: float = 0.0
    """-2 to 2. Like `presence_penalty`, multiplied by the number of occurrences."""
    logit_bias: dict[int, float] | None = None
    """Ids and the values to add to their logits, -100 to 100; stored as a dict."""
    allowed_token_ids: list[int] | None = None
    """Only these ids are sampled; at least one. None allows all."""
    bad_words: list[str] | None = None
    """Texts that the output must not contain; stored as a list."""
    min_tokens: int = 0
    """Nothing ends a sequence before it has this many output ids."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last ids. -1 keeps as many as fit, None keeps all."""
    truncation_side: str | None = None
    """`right` keeps the first ids instead. `left` and None keep the last ones."""
    logprobs: int | None = None
    """Return in `CompletionOutput.logprobs` the log probability of each output id, and of this many of the likeliest
    ids in its place."""
    prompt_logprobs: int | None = None
    """Return the same for the prompt's ids in `RequestOutput.prompt_logprobs`."""
    logprob_token_ids: list[int] | None = None
    """Return the log probabilities of these ids, at most 128, in `CompletionOutput.logprobs`, instead of those of the
    likeliest ids; stored as a list."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint that the output must match."""
    use_beam_search: bool = False
    """The sequences are the best n that a beam search of width n finds, the best first. See `LLM.beam_search`."""
    length_penalty: float = 1.0
    """With `use_beam_search`: a sequence's score is the sum of its log probabilities, divided by
    length ** length_penalty."""
    early_stopping: bool | Literal["never"] = False
    """With `use_beam_search`: see `BeamSearchParams`."""
    prediction: str | None = None
    """A text that most of the output may equal: the server's speculative decoding proposes ids of it, if its method is
    `ngram`. It changes no output."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate."""
        return self.best_of or self.n

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_options()
        self._keep_lists()

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1, MOST["n"])
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, MOST["best_of"])
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 and at most 1, not 0")
        check_integer("top_k", self.top_k, -1, MAX_INT32)
        check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        check_integer("min_tokens", self.min_tokens, 0, MAX_INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, not {self.min_tokens}")
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INT32)
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be -1 or at least 1, not 0")
        check_side(self.truncation_side)
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', not {shown(self.early_stopping)}")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, 0, MOST["logprobs"])

    def _check_options(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise TypeError(f"structured_outputs must be StructuredOutputsParams, not {shown(self.structured_outputs)}")
        if not isinstance(self.prediction, str | None):
            raise TypeError(f"prediction must be a string, not {shown(self.prediction)}")
        flags = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens")
        for name in (*flags, "use_beam_search"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {shown(value)}")

    def _keep_lists(self) -> None:
        """Check the lists, and store each in its normal form. force_setattr, because the struct is frozen."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        kept: dict[str, Any] = {
            "stop": _texts("stop", stop, MOST["stop_strings"]),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids or [], MOST["stop_token_ids"]),
            "logprob_token_ids": _ids("logprob_token_ids", self.logprob_token_ids or [], MAX_LOGPROB_TOKEN_IDS),
            "bad_words": _texts("bad_words", self.bad_words, MOST["bad_words"]),
            "logit_bias": _bias(self.logit_bias),
        }
        if self.allowed_token_ids is not None:
            kept["allowed_token_ids"] = _ids("allowed_token_ids", self.allowed_token_ids, MAX_INT32)
            if not kept["allowed_token_ids"]:
                raise ValueError("allowed_token_ids must hold at least one id; None allows all")
        for name, value in kept.items():
            msgspec.structs.force_setattr(self, name, value)


def _texts(name: str, texts: Any, most: int) -> list[str]:
    if texts is None:
        return []
    if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
        raise TypeError(f"{name} must be a {'string or a ' * (name == 'stop')}list of strings, not {shown(texts)}")
    if len(texts) > most:
        raise ValueError(f"{name} must hold at most {most} strings, not {len(texts)}")
    for one in texts:
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise ValueError(f"{name} must hold strings of 1 to {MAX_STOP_CHARS} characters, not one of {len(one)}")
    return list(texts)


def _ids(name: str, ids: Any, most: int) -> list[int]:
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"{name} must be a list of integers, not {shown(ids)}")
    if len(ids) > most:
        raise ValueError(f"{name} must hold at most {most} ids, not {len(ids)}")
    for place, one in enumerate(ids):
        check_integer(f"{name}[{place}]", one, 0, MAX_INT32)
    return list(ids)


def _bias(bias: Any) -> dict[int, float]:
    """Check a bias. Ids may be integers, as in vLLM, or strings, as in OpenAI's clients."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must be a dict of ids and numbers, not {shown(bias)}")
    if len(bias) > MOST["logit_bias"]:
        raise ValueError(f"logit_bias must hold at most {MOST['logit_bias']} ids, not {len(bias)}")
    read: dict[int, float] = {}
    for key, value in bias.items():
        is_number = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token_id = int(key) if is_number else key
        check_integer("logit_bias must have token ids as keys: each", token_id, 0, MAX_INT32)
        check_number(f"logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS)
        read[token_id] = value
    return read
