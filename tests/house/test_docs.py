"""Everything that the documents name exists."""

import ast
import functools
import re
from pathlib import Path
from typing import get_args

import pytest

from pipeline import __main__ as cli
from pipeline.config.load import load
from pipeline.runtime import messages as m

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("pipeline/", "stages/", "kernels/", "shm/", "config/", "tests/", "tools/", "docs/")
COMMAND = re.compile(r"^(?:\.venv/bin/)?pipeline (.+?)(?: +#.*| > .*)?$", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_path_exists(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = [path for path in re.findall(r"`([\w./-]+)`", text) if path.startswith(FOLDERS)]
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


NAMED = re.compile(r"`([\w./-]+\.py)::([\w.]+)`")


def _defines(tree: ast.Module | ast.ClassDef, name: str) -> bool:
    """Whether a module or class has a function, class or variable: `Class.method` is one of a class."""
    first, _, rest = name.partition(".")
    for node in tree.body:
        match node:
            case ast.ClassDef() if node.name == first:
                return not rest or _defines(node, rest)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == first:
                return not rest
            case ast.AnnAssign(target=ast.Name(id=found)) | ast.Assign(targets=[ast.Name(id=found)]) if found == first:
                return not rest
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_function_that_a_document_names_is_defined_there(document: Path) -> None:
    named = NAMED.findall(document.read_text())
    assert named or document.name != "architecture.md"
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not ((ROOT / file).exists() and _defines(ast.parse((ROOT / file).read_text()), name))
    ]
    assert missing == []


FILE = re.compile(r"[\w/]+\.(?:py|h|cpp)")
MEMBER = re.compile(r"[A-Z]\w*[a-z]\w*\.\w+")


@functools.cache
def _sources() -> list[str]:
    files = [path for folder in ("pipeline", "stages", "config", "shm") for path in (ROOT / folder).rglob("*.py")]
    return [path.read_text() for path in files if not path.is_relative_to(ROOT / "pipeline/stages")]


@functools.cache
def _classes(name: str) -> list[ast.ClassDef]:
    """The classes of this name. Only their files are parsed: all of them take seconds."""
    named = [ast.parse(text) for text in _sources() if f"class {name}" in text]
    return [node for tree in named for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]


def _unknown_names(rows: list[str]) -> list[str]:
    """Files without a folder (`x.py` there) that stand beside no file of their row, and members of no class."""
    unknown = []
    for row in rows:
        named = [one.partition("::")[0] for one in re.findall(r"`([^`]+)`", row)]
        folders = [ROOT / one if (ROOT / one).is_dir() else (ROOT / one).parent for one in named if "/" in one]
        unknown += [
            one
            for one in named
            if (FILE.fullmatch(one) and not any((folder / one).exists() for folder in (ROOT, *folders)))
            or (MEMBER.fullmatch(one) and not _is_member(one))
        ]
    return unknown


def _is_member(name: str) -> bool:
    first, _, rest = name.partition(".")
    return any(_defines(one, rest) for one in _classes(first))


def test_every_name_in_the_tables_of_the_architecture_exists() -> None:
    rows = re.findall(r"^\| .+", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert _unknown_names(rows) == ["Scheduler.schedule"], "is vLLM's"
    known = "| a | `stages/schedule/stage.py`, `planner.py` there, `Planner.plan` |"
    assert _unknown_names([known]) == []
    assert _unknown_names([known.replace("planner.py", "plans.py")]) == ["plans.py"]
    assert _unknown_names([known.replace("Planner.plan", "Planner.planned")]) == ["Planner.planned"]


def test_a_name_that_is_only_used_is_not_defined() -> None:
    tree = ast.parse("import a\nB: int = a.b\nclass C:\n    x = 1\n    async def d(self): e()\n")
    assert all(_defines(tree, name) for name in ("B", "C", "C.x", "C.d"))
    assert not any(_defines(tree, name) for name in ("a", "d", "e", "C.e", "B.b", "C.d.e"))


def test_every_message_is_in_the_table_of_the_architecture() -> None:
    stages = (m.GatewayInbox, m.IngestInbox, m.ScheduleInbox, m.ExecuteInbox, m.DetokenizeInbox)
    inboxes = (*stages, m.SupervisorInbox, m.HostInbox, m.ControlRequest)
    names = {kind.__name__ for inbox in inboxes for kind in get_args(inbox)}
    text = (ROOT / "docs/architecture.md").read_text()
    table = text[text.index("## Messages") : text.index("These rules hold on every path")]
    assert sorted(names.difference(re.findall(r"`(\w+)`", table))) == []


def _headings(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return {f"{slug}-{before}" if (before := found[:index].count(slug)) else slug for index, slug in enumerate(found)}


HEADINGS = {document: _headings(document) for document in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_anchor_is_a_heading(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", document.read_text())
    inside = [(file, anchor) for file, anchor in links if "://" not in file]
    missing = [
        f"{file}#{anchor}"
        for file, anchor in inside
        if anchor not in HEADINGS.get((document.parent / file).resolve() if file else document, set())
    ]
    assert missing == []


def test_every_api_has_a_page() -> None:
    apis = {path.name for path in (ROOT / "stages/gateway/apis").iterdir() if (path / "__init__.py").exists()}
    assert apis and apis <= {path.stem for path in (ROOT / "docs/http").glob("*.md")}


def test_every_page_is_linked_from_the_map_in_readme() -> None:
    """Its links, and those of two pages that have pages of their own, reach every document."""
    linked = {
        (document.parent / link).resolve()
        for document in (ROOT / "README.md", ROOT / "docs/http.md", ROOT / "docs/performance.md")
        for link in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", document.read_text())
        if "://" not in link
    }
    assert [path.name for path in DOCUMENTS[1:] if path not in linked] == []


def test_headings_have_githubs_anchors(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# … get JSON?\n## llama.cpp and `vLLM`\n```sh\n# no heading\n```\n## Two\n## Two\n")
    assert _headings(tmp_path / "a.md") == {"-get-json", "llamacpp-and-vllm", "two", "two-1"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_accepted_by_the_command_line(document: Path) -> None:
    commands = COMMAND.findall(document.read_text())
    assert commands or document.name != "README.md"
    for command in commands:
        words = command.replace("cfg.toml", "default").split()
        cli._parser().parse_args(words)


CURL = re.compile(r"^ *curl (?:'[^']*'|\\\n|[^'\n])*", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_body_that_curl_sends_has_its_type(document: Path) -> None:
    """curl declares a form, which gets 415. Ollama's routes take it: its clients send no other."""
    calls = [one for one in CURL.findall(document.read_text()) if re.search(r" (-d|--data\S*) ", one)]
    assert calls or document.name != "how-to.md"
    assert [one for one in calls if "Content-Type: " not in one and "/api/" not in one] == []


def test_the_forward_pass_in_the_documents_is_that_of_the_models() -> None:
    shown = re.search(r"```python\n(def build.+?)```", (ROOT / "docs/adding_a_model.md").read_text(), re.DOTALL)
    assert shown is not None
    source = (ROOT / "stages/execute/models/decoder.py").read_text()
    rest = source[source.index("def build") :]
    for part in re.split(r"^ *…\n", shown[1], flags=re.MULTILINE):
        assert part in rest, f"decoder.py does not have, in this order:\n{part}"
        rest = rest[rest.index(part) + len(part) :]


def test_every_make_target_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"^make (\w+)", document.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name}: make {target}"


def test_the_settings_in_readme_are_valid() -> None:
    sets = re.findall(r"--set (\S+=\S+)", (ROOT / "README.md").read_text())
    assert sets
    load(None, sets)


def test_the_table_of_models_is_that_of_the_command_line() -> None:
    from pipeline.cli.models import supported_models

    rows = re.findall(
        r"^\| ([\w-]+) +\| (.+?) +\| (.+?) +\| (.+?) +\|$", (ROOT / "docs/models.md").read_text(), re.MULTILINE
    )
    found = [(one.architecture, one.models, ", ".join(one.backends), one.gguf or "–") for one in supported_models()]
    assert rows[1:] == found
    assert f"of {len(found)} architectures" in (ROOT / "README.md").read_text()
