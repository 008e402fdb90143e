"""Every key of every architecture's config.json means what it means in transformers: absent, null, by another name, in
the old and in the new form. A wrong value is an error of one line that names the key.

    PIPELINE_ALL_CASES=1 pytest tests/stages/prepare/sources/test_config_keys.py    all architectures, in half a minute
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.source import ModelError
from tests.stages.execute.tiny_architectures import VARIANTS, VOCAB_SIZE

SLICE = ("gpt2", "phi3, long longrope", "gpt_oss", "olmo3", "ministral3", "ernie4_5", "gemma3")
"""Together they have all forms of keys: other names, RoPE by layer, defaults of whole objects, null sizes."""
NAMES = list(VARIANTS) if os.environ.get("PIPELINE_ALL_CASES") else SLICE

REQUIRED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "ffn_dim"),
    *("n_embd", "n_head", "n_layer", "d_model", "n_heads", "n_layers"),
)
"""transformers has sizes for them, of a model of its own choice."""
TOKENS = ("bos_token_id", "eos_token_id")
"""The same for ids."""
FAILURES = (ValueError, TypeError, KeyError, AttributeError, AssertionError, StrictDataclassError)
"""What transformers raises for configs that it can't read."""
SKIPPED = ("model_type", "architectures", "transformers_version", "dtype")
WRONG: tuple[Any, ...] = (None, "x", [], {}, True, -1, 0, 1.5, 2**70, [None], {"a": None})

Config = dict[str, Any]
Path_ = tuple[str, ...]


def configs_of(name: str) -> Iterator[Config]:
    """The config.json of an architecture, as transformers 5 and 4 write it."""
    variant = VARIANTS[name]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(variant.kind, vocab_size=VOCAB_SIZE, **{**variant.sizes, **ids, **variant.changes})
    new = json.loads(json.dumps(config.to_dict())) | {"architectures": None}
    yield new
    rope = new.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        old = {key: value for key, value in new.items() if key != "rope_parameters"}
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        outside = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        yield {**old, **outside, "rope_scaling": None if rope.get("rope_type") == "default" else scaling}


def paths_in(config: Config) -> list[Path_]:
    """The keys of a config.json, and those of the objects in it."""
    paths: list[Path_] = []
    for key, value in config.items():
        if key not in SKIPPED:
            paths += [(key,), *((key, *path) for path in (paths_in(value) if isinstance(value, dict) else ()))]
    return paths


def changed(config: Config, path: Path_, *value: Any) -> Config:
    """A copy with another value at a path; without a value, without the key."""
    copy = json.loads(json.dumps(config))
    where = copy
    for key in path[:-1]:
        where = where[key]
    if value:
        where[path[-1]] = value[0]
    else:
        del where[path[-1]]
    return copy


def read(config: Config) -> ModelConfig:
    model = ConfigReader(Path("config.json"), config).model("tiny", [], {})
    return msgspec.structs.replace(model, layout=Layout())


def normalized(config: Config) -> Config | None:
    """The config.json that transformers writes after reading one; None if it can't read it."""
    keys = json.loads(json.dumps(config))
    try:
        written = AutoConfig.for_model(keys.pop("model_type"), **keys).to_dict()
    except FAILURES:
        return None
    return {**json.loads(json.dumps(written)), "architectures": None}


@pytest.mark.parametrize("name", NAMES)
def test_keys_mean_what_they_mean_in_transformers(name: str) -> None:
    num = 0
    for config in configs_of(name):
        names = getattr(type(AutoConfig.for_model(VARIANTS[name].kind)), "attribute_map", {})
        forms: dict[Path_, Config] = {("as it is",): config}
        for path in paths_in(config):
            if path[-1] not in TOKENS:
                forms["null", *path] = changed(config, path, None)
            if path[-1] not in (*REQUIRED, *TOKENS):
                forms["absent", *path] = changed(config, path)
        for alias, key in names.items():
            if key in config:
                forms["alias", alias] = changed({**config, alias: config[key]}, (key,))
        for form, written in forms.items():
            if (theirs := normalized(written)) is None:
                continue
            num += 1
            try:
                expected = read(theirs)
            except ModelError:
                continue  # refused by name, whatever the form
            assert read(written) == expected, form
    assert num > 20


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_is_an_error_that_names_its_key(name: str) -> None:
    num_refused = 0
    for config in configs_of(name):
        for path in paths_in(config):
            for value in WRONG:
                try:
                    read(changed(config, path, value))
                except ModelError as error:  # any other error fails the test
                    num_refused += 1
                    words = str(error)
                    assert "\n" not in words
                    assert path[-1] in words or "max_position" in words, (path, value)
    assert num_refused > 50


def test_a_null_theta_is_refused_if_it_counts() -> None:
    """transformers fails with a TypeError, and a default would be another model."""
    config = next(configs_of("falcon 3"))
    theirs = {key: value for key, value in config.items() if key != "rope_parameters"}
    with pytest.raises(ModelError, match=r"config\.json: rope_theta is None; it must be a number, or absent"):
        read({**theirs, "rope_theta": None})
    assert read({**config, "rope_theta": None}) == read(config)
