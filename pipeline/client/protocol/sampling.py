"""Sampling parameters and stop conditions that a client can ask for, with their units and ranges.

The one place where they are declared: the bodies over HTTP, the requests over ZeroMQ and `SamplingParams` inherit these
fields. Those that `GenerationOptions` also has are copied there by their name.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pipeline.config.sections.requests import MAX_BUDGET_MESSAGE_CHARS

MAX_STOP_CHARS = 256
"""Longest stop string, and longest entry of bad_words."""
MAX_BIAS = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""vLLM allows all values above 0, but logits scaled by values outside this range overflow."""

MAX_LENGTH_PENALTY = 10.0
"""A length to a higher power is too large for a score to have any digits left."""

MAX_LOGPROB_TOKEN_IDS = 128
"""As in vLLM."""

Id = Annotated[int, Meta(ge=0, lt=2**31)]
ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(description="-2^63 to 2^64 - 1; the same seed gives the same text.")]
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
PresencePenalty = Annotated[
    float, Meta(ge=-2, le=2, description="Above 0 makes tokens of the output less likely; default 0.")
]
FrequencyPenalty = Annotated[
    float,
    Meta(ge=-2, le=2, description="Like presence_penalty, multiplied by the number of occurrences; default 0."),
]
ThinkingTokenBudget = Annotated[
    int,
    Meta(
        ge=-1,
        lt=2**31,
        description="For chats: the most tokens of reasoning; then it is ended, and the answer follows. 0 ends it at "
        "once, -1 sets no limit. By default the server's, none.",
    ),
]
STOP = Meta(description="The text ends before the first of these strings.")
Stop = Annotated[str | list[ShortText], STOP]


class SamplingFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How tokens are sampled and where text ends. None is the default, in every field."""

    n: Annotated[int, Meta(ge=1, description="Number of choices for each prompt; default 1.")] | None = None
    temperature: Annotated[Temperature, Meta(description="0 is greedy. By default the model's, else 1.")] | None = None
    top_p: Annotated[TopP, Meta(description="By default the model's, else 1.")] | None = None
    top_k: Annotated[TopK, Meta(description="-1 and 0 are off. By default the model's, else off.")] | None = None
    min_p: Annotated[MinP, Meta(description="By default the model's, else 0.")] | None = None
    seed: Seed | None = None
    repetition_penalty: (
        Annotated[
            RepetitionPenalty,
            Meta(
                description="Above 1 makes tokens of the prompt and the output less likely. By default the model's, "
                "else 1."
            ),
        ]
        | None
    ) = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    logit_bias: (
        Annotated[dict[str, float], Meta(description="Token ids and the values to add to their logits, -100 to 100.")]
        | None
    ) = None
    allowed_token_ids: Annotated[list[Id], Meta(min_length=1, description="Only these ids are sampled.")] | None = None
    bad_words: Annotated[list[ShortText], Meta(description="Texts that the output must not contain.")] | None = None
    min_tokens: (
        Annotated[
            int, Meta(ge=0, lt=2**31, description="Nothing ends a choice before it has this many tokens; default 0.")
        ]
        | None
    ) = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Id], Meta(description="Token ids that end a choice.")] | None = None
    ignore_eos: Annotated[bool, Meta(description="true: continue after the model's end of sequence.")] | None = None
    skip_special_tokens: (
        Annotated[bool, Meta(description="false: the text has special tokens; default true.")] | None
    ) = None
    spaces_between_special_tokens: Annotated[bool, Meta(description="Changes nothing.")] | None = None
    """vLLM's: no supported tokenizer puts spaces between special tokens."""
    include_stop_str_in_output: (
        Annotated[bool, Meta(description="true: the text ends after the stop string.")] | None
    ) = None
    logprob_token_ids: (
        Annotated[
            list[Id],
            Meta(
                max_length=MAX_LOGPROB_TOKEN_IDS,
                description="With logprobs: return log probabilities of these ids instead of the likeliest ones.",
            ),
        ]
        | None
    ) = None
    prompt_logprobs: (
        Annotated[
            int, Meta(ge=0, description="Return log probabilities of the prompt's tokens, with this many top logprobs.")
        ]
        | None
    ) = None
    use_beam_search: (
        Annotated[bool, Meta(description="true: the choices are the best n that a beam search of width n finds.")]
        | None
    ) = None
    length_penalty: (
        Annotated[
            float,
            Meta(
                ge=-MAX_LENGTH_PENALTY,
                le=MAX_LENGTH_PENALTY,
                description="With use_beam_search: the score of a choice is the sum of its log probabilities, divided "
                "by length ** length_penalty; default 1.",
            ),
        ]
        | None
    ) = None
    thinking_token_budget: ThinkingTokenBudget | None = None
    reasoning_budget_message: (
        Annotated[
            str,
            Meta(
                max_length=MAX_BUDGET_MESSAGE_CHARS,
                description="A text that the reasoning ends with if its budget is used. By default the server's.",
            ),
        ]
        | None
    ) = None
    reasoning_control: (
        Annotated[bool, Meta(description="true: the reasoning can be ended while the reply is generated.")] | None
    ) = None
    early_stopping: (
        Annotated[
            bool | Literal["never"],
            Meta(
                description="With use_beam_search: true ends the search when it has found n choices, never when no "
                "beam can get a better score; default false, when no beam has one."
            ),
        ]
        | None
    ) = None
