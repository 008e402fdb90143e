"""Combinations with speculative decoding that can't work are refused, and the message names the key."""

import pytest

from pipeline.config.load import ConfigError, load


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["speculative.method=eagle", "speculative.draft=x", "execute.device=cuda"],
            r"speculative\.method: 'eagle' needs execute\.device",
        ),
        (["speculative.method=draft_model"], r"speculative\.draft: 'draft_model' in speculative\.method needs a model"),
        (["speculative.draft=x.gguf"], r"speculative\.draft: needs speculative\.method = 'draft_model'"),
        (["speculative.method=ngram", "speculative.prompt_lookup_min=6"], r"prompt_lookup_min: 6 is more than .* = 5"),
        (["speculative.num_speculative_tokens=16"], "num_speculative_tokens"),
    ],
)
def test_what_speculative_decoding_cannot_do_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(sets=sets)


def test_speculative_decoding_is_off_by_default() -> None:
    assert load().speculative.method == "none"
    assert load(sets=["speculative.method=ngram"]).speculative.num_speculative_tokens == 7
