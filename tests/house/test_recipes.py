"""The recipes of CONTRIBUTING.md, followed step by step on a copy of the tree, work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "stages", "kernels", "shm", "config")
MAX_LINES = 6
"""The longest recipe."""


class Tree:
    """An editable copy of the product and of the table of keys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changed: set[str] = set()
        for name in PACKAGES:
            shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "tests/config/test_every_key.py", root)

    def add(self, path: str, anchor: str, text: str) -> None:
        """Insert `text` before the one line that begins with `anchor`, or at the end if `anchor` is empty."""
        file = self.root / path
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        self.changed.add(path)
        (index,) = [i for i, line in enumerate(lines) if line.startswith(anchor)] if anchor else [len(lines)]
        file.write_text("".join([*lines[:index], text, *lines[index:]]))

    def replace(self, path: str, old: str, new: str) -> None:
        file = self.root / path
        text = file.read_text()
        self.changed.add(path)
        assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
        file.write_text(text.replace(old, new))

    def python(self, *args: str, code: int = 0) -> str:
        """Run Python on this tree, with the tests of the real one. Returns stdout, or stderr if `code` is not 0."""
        found = subprocess.run(
            [sys.executable, *args],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": f"{self.root}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert found.returncode == code, found.stderr
        return found.stdout if code == 0 else found.stderr

    def write_defaults(self) -> None:
        """pipeline config show > config/presets/default.toml"""
        (self.root / "config/presets/default.toml").write_text(self.python("-m", "pipeline", "config", "show"))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def recipes() -> list[str]:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add something\n")[1].split("\n## ")[0]
    return section.strip().removeprefix("- ").split("\n- ")


def test_each_recipe_is_short() -> None:
    assert len(recipes()) >= 8
    assert [recipe for recipe in recipes() if len(recipe.splitlines()) > MAX_LINES] == []


def test_adding_a_sampling_parameter(tree: Tree) -> None:
    """It touches three files of the product: clients, all routes, ranges and the API's description follow."""
    fields, options, rows = (
        *("pipeline/client/protocol/sampling.py", "pipeline/runtime/messages/requests.py"),
        "stages/execute/rows.py",
    )
    field = '    warmth: Annotated[float, Meta(ge=0, le=4, description="Added to the temperature.")] | None = None\n'
    tree.add(fields, "    min_p: ", field)
    tree.replace(
        options,
        "    with_special_spans: bool = False\n",
        "    with_special_spans: bool = False\n    warmth: float = 0.0\n",
    )
    tree.replace(rows, "single(options.temperature)", "single(options.temperature + options.warmth)")
    assert len(tree.changed) == 3
    tree.python(
        "-c",
        """if True:
        import json
        import numpy as np
        import pytest
        from pipeline import SamplingParams
        from pipeline.client import protocol as p
        from pipeline.client.connection.wire import params_fields
        from pipeline.stages.execute.rows import RowTable
        from pipeline.stages.gateway.apidocs.schemas import Schemas
        from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
        from pipeline.stages.gateway.apis.tokens.parsing import parse_tokens_only
        from pipeline.stages.gateway.errors import ApiError
        from pipeline.stages.gateway.parsing.bodies import ChatBody
        from tests.stages.gateway.gate import CHAT, COMPLETION
        from tests.stages.gateway.parsing.bodies import LIMITS
        from tests.zmq_requests import generate, parsed

        def read(parse, body, **fields):
            return parse(json.dumps(body | fields).encode(), LIMITS).options

        params = params_fields(SamplingParams(warmth=1.5))
        found = [
            read(parse_chat, CHAT, warmth=1.5),
            read(parse_completion, COMPLETION, warmth=1.5),
            read(parse_tokens_only, {"token_ids": [1], "sampling_params": {"warmth": 1.5}}),
            parsed(generate(1, "Hi", params), LIMITS).options,
        ]
        assert [options.warmth for options in found] == [1.5] * 4
        assert read(parse_chat, CHAT).warmth == 0
        for refused in (lambda: read(parse_chat, CHAT, warmth=5), lambda: parsed(generate(1, warmth=5), LIMITS)):
            with pytest.raises(ApiError, match="'warmth' must be a number >= 0 and <= 4"):
                refused()
        with pytest.raises(ValueError, match="warmth must be from 0 to 4, not 5"):
            SamplingParams(warmth=5)
        schemas = Schemas()
        schemas.of(ChatBody)
        assert "Added to the temperature" in str(schemas.components["ChatBody"]["properties"]["warmth"])

        table = RowTable(1, 8, 4, 64)
        table.add(0, 0, 0, np.array([1], np.int32), np.array([0], np.int32), found[0], ())
        assert table.temperature[0] == 2.5
        """,
    )


def test_adding_a_config_key(tree: Tree) -> None:
    field = '    nap_s: Annotated[float, Meta(ge=0, le=9, description="Seconds of sleep between steps.")] = 0.5\n'
    tree.add("config/sections/stages.py", "    policy: Annotated[", field)
    tree.write_defaults()
    defaults = (tree.root / "config/presets/default.toml").read_text()
    assert "\n# Seconds of sleep between steps.\n" in defaults and "\nnap_s = 0.5\n" in defaults
    assert "\nnap_s = 2.0\n" in tree.python("-m", "pipeline", "config", "show", "--set", "schedule.nap_s=2")
    assert "schedule.nap_s" in tree.python("-m", "pipeline", "config", "show", "--set", "schedule.nap_s=10", code=2)

    check = "import test_every_key as t; t.test_every_key_has_a_test_of_its_effect()"
    assert "keys without a test" in tree.python("-c", check, code=1)
    tree.replace(
        "test_every_key.py", "EFFECTS = {\n", 'EFFECTS = {\n    "schedule.nap_s": "tests/test_x.py::test_y",\n'
    )
    tree.python("-c", check)


def test_adding_a_metric(tree: Tree) -> None:
    tree.add("pipeline/metrics/stats.py", "    plan_wait_s: HistogramCounts", "    num_naps: int = 0\n")
    last = "            gaps=metrics.gaps(),\n"
    tree.replace("stages/schedule/scheduler.py", last, f"{last}            num_naps=7,\n")
    start = '    yield counter_by_stage(\n        "pipeline_schedule_forks"'
    line = '    yield counter_by_stage("pipeline_schedule_naps", "Naps.", schedule, lambda c: c.num_naps)\n'
    tree.replace("pipeline/metrics/own_metrics.py", start, line + start)
    text = tree.python(
        "-c",
        """if True:
        from pipeline.metrics.exposition import text_of
        from pipeline.stages.schedule.scheduler import Scheduler
        from tests.metrics.test_exposition import server, stage
        from tests.stages.schedule.bench import config

        print(text_of(server(stage("schedule.0", Scheduler(config()).counts()))).decode())
        """,
    )
    assert '\npipeline_schedule_naps_total{stage="schedule.0"} 7\n' in text


def test_adding_an_op(tree: Tree) -> None:
    lines = """
        from torch import Tensor

        def double(out: Tensor) -> None:
            out *= 2

        def double_reference(x: Tensor) -> Tensor:
            return x.double() * 2
    """
    tree.add("kernels/double.py", "", dedent(lines))
    tree.add("kernels/select.py", "from pipeline.kernels import", "from pipeline.kernels import double\n")
    tree.add("kernels/select.py", "    silu_mul: Callable", "    double: Callable[[Tensor], None]\n")
    tree.add("kernels/select.py", "        silu_mul=", "        double=double.double,\n")
    tree.python(
        "-c",
        """if True:
        import torch
        from pipeline.kernels.double import double_reference
        from pipeline.kernels.select import select

        x = torch.randn(7)
        expected = double_reference(x)
        select("cpu", torch.float32).double(x)
        torch.testing.assert_close(x.double(), expected)
        """,
    )


def test_adding_a_scheduling_policy(tree: Tree) -> None:
    policies, settings = "stages/schedule/policies/policy.py", "config/sections/stages.py"
    lines = """
        class Lifo(Fcfs):
            def rank(self, request: RequestState) -> int:
                return -int(request.arrival_s)

    """
    tree.add(policies, "POLICIES: dict", dedent(lines))
    tree.replace(policies, '    "fcfs": Fcfs,\n', '    "fcfs": Fcfs,\n    "lifo": Lifo,\n')
    tree.replace(settings, 'PolicyName = Literal["fcfs"', 'PolicyName = Literal["lifo", "fcfs"')
    tree.replace(settings, "description='Order of waiting requests: ", 'description=\'"lifo" starts the last first; ')
    tree.write_defaults()
    assert '"lifo" starts the last first' in (tree.root / "config/presets/default.toml").read_text()
    order = tree.python(
        "-c",
        """if True:
        from pipeline.config.load import load
        from tests.stages.schedule.bench import Bench, config

        bench = Bench(config(max_num_seqs=1, policy=load(sets=["schedule.policy=lifo"]).schedule.policy), depth=1)
        bench.admit(range(9))
        bench.fill()
        bench.admit(range(9))
        bench.admit(range(9))
        bench.run()
        bench.check_outputs()
        print(list(bench.finished))
        """,
    )
    assert order == "[1, 3, 2]\n"


def test_adding_a_tool_call_parser(tree: Tree) -> None:
    lines = """
        from pipeline.text.formats.parsing.calls import CallParser
        from pipeline.text.formats.tool_format import ToolFormat

        class Arrow(ToolFormat):
            name = "arrow"
            marks = ("-->",)

            def detects(self, template):
                return "-->" in template

            def parser(self, names, marks):
                return ArrowParser(marks.each(self.marks), marks.hidden, names)

            def grammar(self, lark, calls, *, parallel):
                return lark.one_of([f"{lark.mark('-->')} {lark.object_of(call, 'arguments')}" for call in calls])

        class ArrowParser(CallParser):
            def _after_call(self, text, at, out):
                self._read = self._outside
                return at
    """
    formats, settings = "pipeline/text/formats/chat_formats.py", "config/sections/requests.py"
    tree.add("pipeline/text/formats/tool_parsers/arrow.py", "", dedent(lines))
    tree.replace(
        formats,
        "from pipeline.text.formats.tool_parsers.hermes",
        "from pipeline.text.formats.tool_parsers.arrow import Arrow\nfrom pipeline.text.formats.tool_parsers.hermes",
    )
    tree.replace(formats, "    Glm4(),\n", "    Glm4(),\n    Arrow(),\n")
    tree.replace(settings, "_XmlToolFormats = Literal[", '_XmlToolFormats = Literal["arrow", ')
    tree.write_defaults()
    assert '"arrow"' in (tree.root / "config/presets/default.toml").read_text()
    calls = tree.python(
        "-c",
        """if True:
        import json
        from pipeline.config.load import load
        from pipeline.text.formats.chat_formats import ChatFormats
        from tests.text.formats.replies import read

        for template, sets in (("", ["chat.tool_call_parser=arrow"]), ("it writes -->", [])):
            formats = ChatFormats.of(template, load(sets=sets).chat)
            reply = read(formats.parser("auto", ["find"]), 'I look. --> {"name": "find", "arguments": {"text": "a"}}')
            assert reply.content == "I look.", reply
            assert [(name, json.loads(text)) for name, text in reply.calls] == [("find", {"text": "a"})]
        """,
    )
    assert calls == ""
