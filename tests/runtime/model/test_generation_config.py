"""A model's recommended sampling parameters are read, or refused with an error that names the file and the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.messages import BEGIN
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.generation_config import GenerationDefaults

RECOMMENDED: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}


def folder_with(path: Path, content: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(content))
    return path


def test_the_parameters_are_read_and_other_keys_ignored(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, {**RECOMMENDED, "do_sample": False, "eos_token_id": [1], "transformers_version": "5"}
    )
    assert generation_config.load(Settings(), folder) == GenerationDefaults(**RECOMMENDED)
    assert generation_config.load(Settings(generation_config="none"), folder) == GenerationDefaults()


def test_null_and_missing_values_are_neutral(tmp_path: Path) -> None:
    no_defaults = GenerationDefaults(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=None
    )
    assert generation_config.load(Settings(), tmp_path) == no_defaults
    folder_with(tmp_path, {**dict.fromkeys(RECOMMENDED), "top_k": -1, "temperature": 1})
    assert generation_config.load(Settings(), tmp_path) == no_defaults


def test_tokens_that_a_model_excludes_are_runs_of_ids(tmp_path: Path) -> None:
    content = {"suppress_tokens": [7, 5], "begin_suppress_tokens": [8, 5], "bad_words_ids": [[3, 4], [9]]}
    folder = folder_with(tmp_path, {**content, "temperature": 0.5})
    excluded = generation_config.excluded(Settings(), folder)
    assert excluded.runs(()) == [[7], [5], [3, 4], [9], [BEGIN, 8], [BEGIN, 5]]
    # transformers filters them from bad_words_ids alone
    assert excluded.runs([5, 9, 4]) == [[7], [5], [3, 4], [BEGIN, 8], [BEGIN, 5]]
    assert generation_config.load(Settings(), folder) == GenerationDefaults(temperature=0.5)
    assert generation_config.excluded(Settings(generation_config="none"), folder).runs(()) == []
    folder_with(tmp_path, {"suppress_tokens": None, "begin_suppress_tokens": None})
    assert generation_config.excluded(Settings(), folder).runs(()) == []


def test_another_folder_excludes_what_its_file_says(tmp_path: Path) -> None:
    keys = {"suppress_tokens": [7], "begin_suppress_tokens": [8], "bad_words_ids": [[9]]}
    model = folder_with(tmp_path / "model", keys)
    for left_out, run in (("suppress_tokens", [7]), ("begin_suppress_tokens", [BEGIN, 8]), ("bad_words_ids", [9])):
        other = folder_with(tmp_path / left_out, {key: ids for key, ids in keys.items() if key != left_out})
        found = generation_config.excluded(Settings(generation_config=str(other)), model).runs(())
        assert len(found) == 2 and run not in found


def test_no_negative_id_of_a_file_stands_for_the_begin(tmp_path: Path) -> None:
    content = {"suppress_tokens": [-1, 7], "begin_suppress_tokens": [-1], "bad_words_ids": [[-1, 4], [4, -1]]}
    assert generation_config.excluded(Settings(), folder_with(tmp_path, content)).runs(()) == [[7]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"suppress_tokens": 7}, r"Expected `array \| null`, got `int` - at `\$.suppress_tokens`"),
        ({"bad_words_ids": [[]]}, r"length >= 1 - at `\$.bad_words_ids\[0\]`"),
        (
            {"bad_words_ids": [[1] * 20_000] * 2},
            "suppress_tokens, begin_suppress_tokens, bad_words_ids have 40000 ids; at most 32768",
        ),
    ],
)
def test_excluded_tokens_that_are_not_ids_are_an_error(tmp_path: Path, content: Any, words: str) -> None:
    folder_with(tmp_path, content)
    with pytest.raises(UserError, match=f"generation_config.json.*{words}"):
        generation_config.excluded(Settings(), tmp_path)


def test_the_setting_names_another_folder(tmp_path: Path) -> None:
    model, other = folder_with(tmp_path / "model", {"top_k": 5}), folder_with(tmp_path / "other", {"temperature": 0.25})
    found = generation_config.load(Settings(generation_config=str(other)), model)
    assert found == GenerationDefaults(temperature=0.25)
    with pytest.raises(
        UserError, match=r"^generation_config '/no/such': /no/such/generation_config.json is missing; use"
    ):
        generation_config.load(Settings(generation_config="/no/such"), model)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": 2.5}, r"Expected `float` <= 2.0 - at `\$.temperature`"),
        ({"top_p": 0}, r"Expected `float` > 0.0 - at `\$.top_p`"),
        ({"top_k": "many"}, r"Expected `int \| null`, got `str` - at `\$.top_k`"),
        ({"max_new_tokens": 0}, r"Expected `int` >= 1 - at `\$.max_new_tokens`"),
        ({"repetition_penalty": 0}, r"at `\$.repetition_penalty`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_an_invalid_value_is_an_error_that_says_what_to_do(tmp_path: Path, content: Any, words: str) -> None:
    folder_with(tmp_path, content)
    with pytest.raises(UserError, match=f"^model a/b: generation_config.json has no valid .*{words}.* to 'none'"):
        generation_config.load(Settings(model="a/b"), tmp_path)
    assert generation_config.load(Settings(generation_config="none"), tmp_path) == GenerationDefaults()


def test_what_prepare_saves_is_what_is_loaded(tmp_path: Path) -> None:
    generation_config.save({"eos_token_id": 2, "temperature": None}, tmp_path)
    assert not list(tmp_path.iterdir())
    generation_config.save({**RECOMMENDED, "eos_token_id": 2}, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == RECOMMENDED
    assert generation_config.load(Settings(), tmp_path) == GenerationDefaults(**RECOMMENDED)
