"""Parameters of embeddings, with the names and meanings of vLLM."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pipeline.client.inputs.checks import MAX_INT32, check_integer, check_one_of, shown
from pipeline.errors import PromptError

POOLINGS = ("last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean")
EMBED = "embed"
TASKS = (EMBED, "token_embed", "classify", "token_classify", "score")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's pooler makes of a prompt: an embedding by default. The constructor raises TypeError or
    ValueError that names the invalid field and the valid values."""

    dimensions: int | None = None
    """Length to which the embedding is cut. None: the model's own."""
    pooling: str | None = None
    """`last` is the last token's hidden state, `mean` the mean over all tokens, `cls` the first token's. None: what the
    model's files say, and `last` for models that generate text. vLLM sets it for the whole server, as
    `--pooler-config`."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last ids. -1 keeps as many as fit, None keeps all."""
    truncation_side: str | None = None
    """`right` keeps the first ids instead. `left` and None keep the last ones."""
    normalize: bool | None = None
    """Another name of `use_activation`, for embeddings."""
    use_activation: bool | None = None
    """False: embeddings of any length, or logits in place of probabilities and scores. None is what the model's files
    say, mostly True."""
    prompt_name: str | None = None
    """The prompt of the model's files that goes before the text, such as `query` or `document`."""
    instruction: str | None = None
    """Of `LLM.score` with a reranker whose template of pairs has a place for it: what makes a document relevant."""
    task: str | None = None
    """`embed`, `token_embed`, `classify`, `token_classify` or `score`. None: the task of the method."""

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, MAX_INT32)
        if self.pooling is not None:
            check_one_of("pooling", self.pooling, POOLINGS)
        if self.task is not None:
            check_one_of("task", self.task, TASKS)
        for name in ("prompt_name", "instruction"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} must be a string, not {type(getattr(self, name)).__name__}")
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INT32)
        if self.truncation_side is not None:
            check_one_of("truncation_side", self.truncation_side, ("left", "right"))
        for name in ("normalize", "use_activation"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"{name} must be None, True or False, not {shown(getattr(self, name))}")
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise ValueError("normalize and use_activation are one parameter: give one of them")


def checked_pooling_params(params: Any, name: str) -> PoolingParams:
    """The parameters, or the default ones for None. Raises PromptError."""
    if params is None:
        return PoolingParams()
    if not isinstance(params, PoolingParams):
        raise PromptError(f"{name} must be PoolingParams, not {type(params).__name__}")
    return params


def with_task(params: PoolingParams, task: str | None, tasks: Sequence[str], name: str) -> PoolingParams:
    """The parameters for a task, by default the first of the model's `tasks` that generates no text. An older server
    names none. Raises PromptError if the model lacks it, or if the parameters, called `name`, have another one."""
    if task is None:
        task = params.task or next((one for one in tasks if one in TASKS), EMBED)
    if task not in TASKS:
        raise PromptError(f"the task must be one of {', '.join(TASKS)}, not {shown(task)}")
    if params.task not in (None, task):
        raise PromptError(f"{name} has task = {params.task}, and this is for {task}")
    if task not in (tasks or (EMBED,)):
        raise PromptError(f"the model has no task {task}: its tasks are {', '.join(tasks) or EMBED}")
    return msgspec.structs.replace(params, task=task)


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
