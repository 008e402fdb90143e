"""Settings of speculative decoding: docs/speculation.md."""

from typing import Annotated, Literal

from msgspec import Meta

from pipeline.config.sections.base import Frozen

MAX_SPECULATIVE_TOKENS = 15
"""With the row's next id, these positions are in two KV blocks at most."""

MIN_NUM_DRAFTS = 64
"""Proposed ids that a step can verify, all rows together, if it has few rows. With many rows, few proposals pay."""


class SpeculativeSettings(Frozen, frozen=True):
    """Speculative decoding: several tokens a step, proposed cheaply and verified by the model. It changes no text."""

    method: Annotated[
        Literal["none", "ngram", "draft_model", "eagle"],
        Meta(
            description='How tokens are proposed: "ngram" looks for the last tokens in the prompt and the output so '
            'far, and proposes what followed there (prompt lookup); "draft_model" computes the smaller model in '
            'speculative.draft; "eagle" computes an EAGLE head for the model, which is there, too.'
        ),
    ] = "none"
    draft: Annotated[
        str,
        Meta(
            description='Model of "draft_model", given as model is; it must have the same tokens as the model. Or the '
            'folder of the head of "eagle". The KV cache of either has as many blocks as the model\'s, and is part of '
            "execute.kv_cache_bytes."
        ),
    ] = ""
    num_speculative_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_SPECULATIVE_TOKENS,
            description="Maximum number of tokens proposed for a sequence in one step.",
        ),
    ] = 7
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64, description='Fewest last tokens that "ngram" looks for.')] = 3
    prompt_lookup_max: Annotated[
        int, Meta(ge=1, le=64, description='Most last tokens that "ngram" looks for; the longest match counts.')
    ] = 5
    adaptive: Annotated[
        bool,
        Meta(
            description="Choose the number of tokens for each sequence by its share of accepted tokens and by the cost "
            "of a step, 0 where speculation does not pay. If false, each step proposes num_speculative_tokens."
        ),
    ] = True


def num_speculative_tokens(settings: SpeculativeSettings) -> int:
    """Ids that may be proposed for a row in one step; 0 without speculative decoding."""
    return 0 if settings.method == "none" else settings.num_speculative_tokens


def max_num_drafts(settings: SpeculativeSettings, max_num_seqs: int) -> int:
    """Ids that may be proposed in one step, all rows together. It bounds the memory for their logits."""
    return min(max_num_seqs * num_speculative_tokens(settings), max(MIN_NUM_DRAFTS, max_num_seqs))
