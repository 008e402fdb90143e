"""tools/check_words.py finds banned words in text, and its list of exceptions only shrinks."""

from pathlib import Path

import pytest

from tools import check_words
from tools.check_words import LISTED, Finding, check_text, faults, findings_in, read_listed, update


def plant(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("# Whoever comes first", "whoever"),
        ('"""Nobody waits."""', "nobody"),
        ('raise ValueError("it was told so")', "told"),
        ('f"{x} of somebody else"', "somebody"),
        ("b'' # a row wishes for nothing", "wishes"),
        ('x = ("a", "the desk")', "desk"),
        ("# the seed of who is alone", "who is alone"),
        ("# Who waits takes a row", "who waits"),
        ("# way was made for it", "way was made"),
    ],
)
def test_a_banned_word_is_found_in_comments_and_strings(line: str, word: str) -> None:
    assert list(check_text(f"x = 1\n{line}\n", is_python=True)) == [Finding(2, word)]


@pytest.mark.parametrize(
    "line",
    [
        "x = told(desk.nobody)",
        'f"{told} and {nobody!r}"',
        "# the folder is_told, retold, untold, desktop, wishbone",
        "# a client that waits; users who read this",
        "# he told me  words: ok",
        'x = "I was told"  # words: ok, output of the model',
    ],
)
def test_code_parts_of_words_and_marked_lines_pass(line: str) -> None:
    assert list(check_text(f"{line}\n", is_python=True)) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("class _PanelPlace: pass", "_PanelPlace"),
        ("class Gone(Exception): pass", "Gone"),
        ("class Events: pass", "Events"),
        ("class PipelineState: pass", "PipelineState"),
        ("def next_place(): pass", "next_place"),
        ("async def took(): pass", "took"),
        ("def f(places, /): pass", "places"),
        ("lambda *, kv_place: 0", "kv_place"),
        ("x.is_told = 1", "is_told"),
        ("(a, [*NEUTRAL]) = x", "NEUTRAL"),
        ("{door for door in x}", "door"),
        ("class A:\n  NEUTRAL: int = 0", "NEUTRAL"),
    ],
)
def test_a_banned_word_is_found_in_what_defines_a_name(line: str, name: str) -> None:
    (finding,) = check_text(f"x = 1\n{line}\n", is_python=True)
    assert finding.line == 1 + len(line.splitlines()) and finding.word.startswith(f"{name}: ")


def test_the_use_of_a_name_and_words_that_contain_others_pass() -> None:
    text = "x = place.told\nreplaced = placement = in_place = indoor = 1\nclass Pins: pass\nplace = 1  # words: ok\n"
    assert list(check_text(text, is_python=True)) == []


def test_the_name_of_a_test_is_a_sentence() -> None:
    text = "def test_a_link_in_place_of_a_door(): pass\ndef test_nobody_waits(): pass\n"
    assert list(check_text(text, is_python=True)) == [Finding(2, "nobody")]


def test_the_name_of_a_module_is_read(tmp_path: Path) -> None:
    plant(tmp_path, "stages/x/rank_place.py", "")
    (finding,) = findings_in(tmp_path)["stages/x/rank_place.py"]
    assert finding.line == 1 and finding.word.startswith("rank_place: ")


def test_a_word_in_a_docstring_is_reported_with_its_own_line() -> None:
    text = 'def f():\n    """One.\n\n    Two, as told.\n    """\n'
    assert list(check_text(text, is_python=True)) == [Finding(4, "told")]


def test_a_marker_covers_only_its_own_line_of_a_document() -> None:
    text = "They told us. <!-- words: ok -->\nNobody else.\n"
    assert list(check_text(text, is_python=False)) == [Finding(2, "nobody")]


def test_documents_settings_sources_and_scripts_are_read_and_links_are_not(tmp_path: Path) -> None:
    for file in ("README.md", "docs/a.md", "config/a.toml", "kernels/cpu/a.h", "stages/x/a.py"):
        plant(tmp_path, file, "# nobody\n")
    plant(tmp_path, "tools/run", "#!/usr/bin/env python3\n# nobody\n")
    plant(tmp_path, "tests/data/stories.json", '"nobody"')
    plant(tmp_path, "tests/data/a.md", "nobody")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "stages").symlink_to(tmp_path / "stages")
    assert {name: len(found) for name, found in findings_in(tmp_path).items()} == dict.fromkeys(
        ("README.md", "docs/a.md", "config/a.toml", "kernels/cpu/a.h", "stages/x/a.py", "tools/run"), 1
    )


def test_a_file_may_have_exactly_the_listed_count() -> None:
    found = {"a.md": [Finding(1, "told"), Finding(2, "told")]}
    assert faults(found, {"a.md": 2}) == []
    assert faults(found, {}) == ["a.md:1: banned word: told", "a.md:2: banned word: told"]
    assert faults(found, {"a.md": 1})[-1] == f"a.md: 2 banned words, {LISTED} allows 1"
    for fewer in ({"a.md": 3}, {"a.md": 2, "gone.md": 1}):
        assert ["--update" in line for line in faults(found, fewer)] == [True]


def test_update_follows_moved_files_and_never_raises_the_sum(tmp_path: Path) -> None:
    plant(tmp_path, LISTED, "2 docs/old.md\n1 docs/mended.md\n")
    plant(tmp_path, "docs/new.md", "told\nnobody\n")
    assert update(findings_in(tmp_path), tmp_path) is None
    assert read_listed(tmp_path) == {"docs/new.md": 2}
    plant(tmp_path, "docs/new.md", "told\nnobody\nwhoever\n")
    assert "3 banned words" in str(update(findings_in(tmp_path), tmp_path))
    assert read_listed(tmp_path) == {"docs/new.md": 2}


def test_the_command_fails_with_the_place_of_each_new_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path, "docs/a.md", "Fine.\nNobody knows.\n")
    found = findings_in(tmp_path)
    monkeypatch.setattr(check_words, "findings_in", lambda: found)
    monkeypatch.setattr(check_words, "read_listed", dict)
    monkeypatch.setattr("sys.argv", ["tools/check_words.py"])
    assert check_words.main() == 1
    assert capsys.readouterr().out == "docs/a.md:2: banned word: nobody\n"
