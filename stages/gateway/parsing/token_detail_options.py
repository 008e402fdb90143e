"""What a reply tells of token ids besides their text: the fields that ask for it, and what they ask of the stages."""

import msgspec

from pipeline.config.settings import Limits as Caps
from pipeline.runtime import logprob_records
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid


class TokenDetailOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing by default."""

    num_top: int | None = None
    """Log probabilities of the ids, and of so many of the likeliest; None: of none."""
    prompt_num_top: int | None = None
    """Likewise of the prompt's, in `prompt_logprobs`."""
    with_echo: bool = False
    """`num_top` is of the prompt's too, which is repeated before the output."""
    with_ids: bool = False
    """`token_ids` and `prompt_token_ids`"""
    names_ids: bool = False
    """Tokens are called `token_id:123`, whatever their text is."""

    @property
    def prompt_record_num_top(self) -> int:
        """`Sampling.prompt_num_top`: what the records of the prompt's ids must have."""
        echoed = self.num_top if self.with_echo else None
        return max((num for num in (echoed, self.prompt_num_top) if num is not None), default=-1)

    def num_of_prompt(self, num_ids: int, num_choices: int) -> int:
        """Log probabilities, those of the likeliest ids among them, that a reply tells of a prompt's ids, with so many
        choices that have them."""
        each = (self.num_top if self.with_echo else None, self.prompt_num_top)
        return num_ids * num_choices * sum(1 + num for num in each if num is not None)


def too_many(details: TokenDetailOptions, num: int, caps: Caps) -> ApiError:
    """400, for a call whose prompts' ids have more to be told of than may be."""
    param = "logprobs" if details.prompt_num_top is None else "prompt_logprobs"
    message = (
        f"'{param}' requests {num} log probabilities of prompt tokens, over all choices and with the top logprobs: the "
        f"limit is {caps.max_prompt_logprobs} (limits.max_prompt_logprobs)"
    )
    return invalid(param, message, "invalid_value")


def check_num_top(param: str, num_top: int | None, caps: Caps) -> int | None:
    """That no more is asked for than may be. Raises ApiError."""
    if num_top is not None and num_top > caps.max_logprobs:
        message = f"'{param}' must be at most {caps.max_logprobs} (limits.max_logprobs)"
        raise invalid(param, message, "invalid_value")
    return num_top


def with_details(
    sampling: m.Sampling, text: m.TextOptions, details: TokenDetailOptions, *, is_scored: bool, with_pieces: bool = True
) -> tuple[m.Sampling, m.TextOptions]:
    """The same, so that the stages tell what a reply will need. `is_scored`: sequences are to be compared by their log
    probabilities, whether these are shown or not."""
    num_top, prompt_num_top = details.num_top or 0, details.prompt_record_num_top
    has_records = is_scored or details.num_top is not None
    return (
        msgspec.structs.replace(sampling, with_logprobs=has_records, num_top=num_top, prompt_num_top=prompt_num_top),
        msgspec.structs.replace(
            text,
            record_bytes=logprob_records.logprob_bytes(num_top) if has_records else 0,
            num_top=num_top,
            prompt_num_top=prompt_num_top,
            with_pieces=with_pieces and (details.num_top is not None or prompt_num_top >= 0),
        ),
    )
