"""Combinations with speculative decoding that can't work are refused, and the message names the key."""

import pytest

from pipeline.config.load import ConfigError, load


@pytest.mark.parametrize(
    ("sets", "message"),
    [
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


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["execute.pipeline_parallel=2", "execute.device=cuda"],
            r"pipeline_parallel: is 2, but execute\.device is 'cu",
        ),
        (
            ["execute.pipeline_parallel=2", "speculative.method=ngram"],
            r"pipeline_parallel: is 2, but speculative\.meth",
        ),
        (
            ["execute.pipeline_parallel=2", "execute.pipeline_layers=[10, 10, 10]"],
            r"pipeline_layers: needs a number for each stage, and execute\.pipeline_parallel is 2: got 3",
        ),
        (
            ["execute.pipeline_parallel=3", "schedule.max_steps_in_flight=2"],
            r"max_steps_in_flight: is 2, but execute\.pipeline_parallel is 3, and each stage needs a step: choose 0",
        ),
        (
            ["execute.pipeline_parallel=2", "execute.tensor_parallel=2", 'execute.cores=["0", "1"]'],
            r"execute\.cores: needs an entry for each rank.*got 2",
        ),
        (
            ["execute.all_reduce=one_shot", "execute.tensor_parallel=2"],
            r"execute\.all_reduce: 'one_shot' has a meaning",
        ),
        (["execute.all_reduce=one_shot", "execute.device=cuda"], r"execute\.all_reduce: 'one_shot' has a meaning only"),
        (
            ["execute.tensor_parallel=2", "execute.device=cuda", "speculative.method=ngram"],
            r"is 2, but speculative\.method is 'ngram'",
        ),
        (["execute.tensor_parallel=2", "execute.kernels=torch"], r"tensor_parallel: is 2, but execute\.kernels is"),
        (["execute.tensor_parallel=2", "execute.dtype=float32"], r"tensor_parallel: is 2, but execute\.dtype is"),
        (["execute.tensor_parallel=2", "lora.runtime_loading=true"], r"tensor_parallel: is 2, but LoRA adapters"),
        (["execute.tensor_parallel=2", "speculative.method=ngram"], r"is 2, but speculative\.method is 'ngram'"),
        (
            ["execute.tensor_parallel=2", 'execute.cores=["0-3"]'],
            r"execute\.cores: needs an entry for each rank.*got 1",
        ),
        (['execute.cores=["3-"]'], r"execute\.cores: '3-' is no list of cores such as '0-7,16-23'"),
        (['execute.cores=["5-3"]'], r"execute\.cores: '5-3' is no list of cores"),
        (["execute.tensor_parallel=0"], r"execute\.tensor_parallel"),
    ],
)
def test_what_ranks_cannot_do_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(sets=sets)
