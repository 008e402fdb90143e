"""A panic of the grammar library becomes an error."""

import json
from pathlib import Path

import pytest

from pipeline.grammars import checker
from pipeline.grammars.checks import Check
from pipeline.grammars.engine import Engine, GrammarsUnsupported
from tests.stages.ingest import models as tiny


def test_a_tokenizer_that_makes_the_library_panic_gives_no_engine(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(GrammarsUnsupported, match="can't be used with grammars: Precompiled"):
        Engine(folder)


def test_a_panic_while_splitting_does_not_affect_grammars(tmp_path: Path) -> None:
    engine = Engine(tiny.folder(tmp_path, tokenizer=tiny.panicking_tokenizer()))
    tag = {"structures": [{"begin": tiny.PANICS}], "triggers": [tiny.PANICS]}
    for kind, source in (("choice", [tiny.PANICS]), ("json_schema", {"const": tiny.PANICS}), ("structural_tag", tag)):
        checked = checker.checked(Check(1, kind, json.dumps(source), 0.0), engine)
        assert checked.grammar and not checked.error, kind


def test_a_panic_in_a_check_is_an_error(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_engine, "matcher", lambda grammar: tiny.panic())
    answer = checker.checked(Check(7, "regex", "a+", 0.0), tiny_engine)
    assert (answer.number, answer.grammar, answer.is_final) == (7, "", True)
    assert answer.error == "it makes the library fail: Onig: Regex search error: retry-limit-in-match over"
