"""Token details of a reply: logprobs and ids; the fields that request them, and what the stages must send. Pure."""

import msgspec

from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid


class TokenDetailOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which token details a reply has. None by default."""

    num_top: int | None = None
    """Logprobs of output ids, with this many top logprobs; None for no logprobs."""
    prompt_num_top: int | None = None
    """The same for prompt ids, in `prompt_logprobs`."""
    with_echo: bool = False
    """`logprobs` include the prompt, which is echoed before the output."""
    with_ids: bool = False
    """`token_ids` and `prompt_token_ids`"""
    names_ids: bool = False
    """Tokens are named `token_id:123`, as with vLLM's return_tokens_as_token_ids."""

    @property
    def prompt_logprobs_num_top(self) -> int:
        """Top logprobs in the token outputs of prompt ids; -1 for no token outputs. See
        `GenerationOptions.num_prompt_logprobs`."""
        echoed = self.num_top if self.with_echo else None
        return max((num for num in (echoed, self.prompt_num_top) if num is not None), default=-1)

    def num_of_prompt(self, num_ids: int, num_choices: int) -> int:
        """Number of logprobs, including top logprobs, that a reply has for a prompt of `num_ids`, if `num_choices`
        choices have them."""
        each = (self.num_top if self.with_echo else None, self.prompt_num_top)
        return num_ids * num_choices * sum(1 + num for num in each if num is not None)


def too_many(details: TokenDetailOptions, num: int, caps: Caps) -> ApiError:
    """400 for a request with too many prompt logprobs."""
    param = "logprobs" if details.prompt_num_top is None else "prompt_logprobs"
    message = (
        f"'{param}' requests {num} log probabilities of prompt tokens, over all choices and with the top logprobs: the "
        f"limit is {caps.max_prompt_logprobs} (limits.max_prompt_logprobs)"
    )
    return invalid(param, message, "invalid_value")


def check_num_top(param: str, num_top: int | None, caps: Caps) -> int | None:
    """Check the number of top logprobs. Raises ApiError."""
    if num_top is not None and num_top > caps.max_logprobs:
        message = f"'{param}' must be at most {caps.max_logprobs} (limits.max_logprobs)"
        raise invalid(param, message, "invalid_value")
    return num_top


def with_details(
    options: m.GenerationOptions, details: TokenDetailOptions, *, is_scored: bool, with_pieces: bool = True
) -> m.GenerationOptions:
    """Add what the stages must send for these details. `is_scored`: sequences are ranked by their logprobs, even if
    these are not returned."""
    num_prompt_logprobs = details.prompt_logprobs_num_top
    num_logprobs = len(options.logprob_token_ids) or details.num_top
    if num_logprobs is None:
        num_logprobs = 0 if is_scored else -1
    return msgspec.structs.replace(
        options,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        with_pieces=with_pieces and (details.num_top is not None or num_prompt_logprobs >= 0),
    )
