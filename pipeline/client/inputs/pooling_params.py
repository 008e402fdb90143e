"""Parameters of embeddings, with the names and meanings of vLLM."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pipeline.client.inputs.checks import MAX_INT32, check_integer, check_one_of, shown
from pipeline.errors import PromptError

POOLINGS = ("last", "mean")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt's hidden states become its embedding. The constructor raises TypeError or ValueError that names the
    invalid field and the valid values."""

    dimensions: int | None = None
    """Length to which the embedding is cut. None: the model's hidden size."""
    pooling: str = "last"
    """`last` is the last token's hidden state, `mean` the mean over all tokens. vLLM sets it for the whole server, as
    `--pooler-config`."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last ids. -1 keeps as many as fit, None keeps all."""
    truncation_side: str | None = None
    """`right` keeps the first ids instead. `left` and None keep the last ones."""
    normalize: bool | None = None
    """Embeddings always have length 1 (L2): only None and True are valid."""

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, MAX_INT32)
        check_one_of("pooling", self.pooling, POOLINGS)
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INT32)
        if self.truncation_side is not None:
            check_one_of("truncation_side", self.truncation_side, ("left", "right"))
        if self.normalize not in (None, True):
            raise ValueError(f"normalize must be None or True, not {shown(self.normalize)}: embeddings have length 1")


def checked_pooling_params(params: Any, name: str) -> PoolingParams:
    """The parameters, or the default ones for None. Raises PromptError."""
    if params is None:
        return PoolingParams()
    if not isinstance(params, PoolingParams):
        raise PromptError(f"{name} must be PoolingParams, not {type(params).__name__}")
    return params


def pooling_params_for(params: Any, num_prompts: int | None, truncate: Any = None) -> Iterator[PoolingParams]:
    """The parameters of each prompt: one for all, or a list with one for each. `num_prompts` is None for an iterator.
    `truncate` is `truncate_prompt_tokens` of those that don't set it. Raises PromptError."""
    for one in _each(params, num_prompts):
        if truncate is None or one.truncate_prompt_tokens is not None:
            yield one
            continue
        try:
            yield msgspec.structs.replace(one, truncate_prompt_tokens=truncate)
        except (TypeError, ValueError) as error:
            raise PromptError(str(error)) from error


def _each(params: Any, num_prompts: int | None) -> Iterator[PoolingParams]:
    if not isinstance(params, Sequence):
        one = checked_pooling_params(params, "pooling_params")
        while True:
            yield one
    if num_prompts is not None and len(params) != num_prompts:
        raise PromptError(
            f"pooling_params has {len(params)} entries for {num_prompts} prompts: give one, or one for each"
        )
    for index, each in enumerate(params):
        yield checked_pooling_params(each, f"pooling_params[{index}]")
    raise PromptError(
        f"pooling_params has {len(params)} entries, but there are more prompts: give one, or one for each"
    )
