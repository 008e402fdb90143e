"""Sampling parameters, with the names, meanings and defaults of vLLM."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import inspect

from pipeline.client import protocol as p
from pipeline.client.inputs.checks import (
    MAX_INT32,
    check_above,
    check_flag,
    check_integer,
    check_number,
    check_one_of,
    shown,
)
from pipeline.client.inputs.structured_params import StructuredOutputsParams
from pipeline.client.protocol.sampling import MAX_BIAS, MAX_STOP_CHARS, SamplingFields

MAX_TEMPERATURE = 2.0
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
_LIMIT = {"prompt_logprobs": "logprobs", "stop": "stop_strings"}
"""Fields whose limit has another name."""
_EMPTY = ("stop", "stop_token_ids", "logprob_token_ids", "bad_words")
"""Lists that are empty if they are not given."""


class SamplingParams(SamplingFields, frozen=True, kw_only=True, omit_defaults=False):  # type: ignore[misc]
    """How tokens are sampled and where text ends. The constructor raises TypeError or ValueError that names the invalid
    field and the valid values.

    `SamplingFields` declares most fields, with their ranges. The defaults are vLLM's, not the model's; those of a
    server's model are in `ServerInfo.default_params`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    use_beam_search: bool = False
    """The sequences are the best n that a beam search of width n finds, the best first. See `LLM.beam_search`."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    """See `BeamSearchParams`."""
    logit_bias: dict[int, float] | None = None  # type: ignore[assignment]
    """Ids and the values to add to their logits, -100 to 100; stored as a dict."""
    best_of: int | None = None
    """Number of sequences to generate. The n with the highest log probability per output id are returned when all have
    ended, the best first. None: n."""
    max_tokens: int | None = 16
    """Maximum number of output ids of each sequence. None: as many as fit the context, up to the model's
    max_new_tokens if its generation_config.json has one."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last ids. -1 keeps as many as fit, None keeps all."""
    truncation_side: str | None = None
    """`right` keeps the first ids instead. `left` and None keep the last ones."""
    logprobs: int | None = None
    """Return in `CompletionOutput.logprobs` the log probability of each output id, and of this many of the likeliest
    ids in its place, or of `logprob_token_ids`. `prompt_logprobs` are in `RequestOutput.prompt_logprobs`."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint that the output must match."""
    prediction: str | None = None
    """A text that most of the output may equal: the server's speculative decoding proposes ids of it, if its method is
    `ngram`. It changes no output."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate."""
        return self.best_of or self.n

    def __post_init__(self) -> None:
        for name, check, is_list in _CHECKS:
            if (value := getattr(self, name)) is None and name in _NULLABLE:
                if name in _EMPTY:
                    msgspec.structs.force_setattr(self, name, [])
            elif is_list:  # it is stored in its normal form; force_setattr, because the struct is frozen
                msgspec.structs.force_setattr(self, name, check(name, value))
            else:
                check(name, value)
        self._check_others()
        msgspec.structs.force_setattr(self, "logit_bias", _bias(self.logit_bias))

    def _check_others(self) -> None:
        """What depends on other fields, or is not in their types."""
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, MOST["best_of"])
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, not {self.min_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be -1 or at least 1, not 0")
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids must hold at least one id; None allows all")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', not {shown(self.early_stopping)}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise TypeError(f"structured_outputs must be StructuredOutputsParams, not {shown(self.structured_outputs)}")
        if not isinstance(self.prediction, str | None):
            raise TypeError(f"prediction must be a string, not {shown(self.prediction)}")


def _texts(name: str, texts: Any, most: int) -> list[str]:
    if name == "stop" and isinstance(texts, str):
        texts = [texts]
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
    for index, one in enumerate(ids):
        check_integer(f"{name}[{index}]", one, 0, MAX_INT32)
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


def _check_of(name: str, kind: inspect.Type) -> Callable[[str, Any], Any] | None:
    """The check of a field over the wire, with the wire's range. None if `_check_others` has it."""
    limit = MOST.get(_LIMIT.get(name, name))
    match kind:
        case inspect.UnionType():
            kinds = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
            lists = [one for one in kinds if isinstance(one, inspect.ListType)]
            return _check_of(name, (lists or kinds)[0]) if lists or len(kinds) == 1 else None
        case inspect.Metadata():
            return _check_of(name, kind.type)
        case inspect.BoolType():
            return check_flag
        case inspect.IntType(ge=least, lt=end):
            most = limit or (2**64 - 1 if end is None else end - 1)
            return partial(check_integer, least=-(2**63) if least is None else least, most=most)
        case inspect.FloatType(gt=None, ge=float() | int() as least, le=float() | int() as most):
            return partial(check_number, least=least, most=most)
        case inspect.FloatType(gt=float() | int() as least, le=float() | int() as most):
            return partial(check_above, least=least, most=most)
        case inspect.LiteralType(values=values):
            return partial(check_one_of, values=values)
        case inspect.ListType(item_type=item, max_length=longest):
            is_text = isinstance(item.type if isinstance(item, inspect.Metadata) else item, inspect.StrType)
            return partial(_texts if is_text else _ids, most=limit or longest or MAX_INT32)
    return None


def _checks() -> list[tuple[str, Callable[[str, Any], Any], bool]]:
    """Names of fields, their checks, and whether these return a list to keep."""
    info = inspect.type_info(p.Request)
    assert isinstance(info, inspect.StructType)
    kinds = {field.name: field.type for field in info.fields}
    given = ((name, _check_of(name, kinds[name])) for name in SamplingParams.__struct_fields__ if name != "best_of")
    return [
        (name, check, isinstance(check, partial) and check.func in (_texts, _ids))
        for name, check in given
        if check is not None
    ]


_NULLABLE = frozenset(name for name, hint in get_type_hints(SamplingParams).items() if type(None) in get_args(hint))
_CHECKS = _checks()
