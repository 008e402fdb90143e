"""Work that blocks has a pool of its own kind, see pipeline/runtime/queues/work_pool.py: asyncio's default one is
shared by all."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVERS = ("stages", "pipeline/runtime", "pipeline/supervisor", "pipeline/deploy", "pipeline/hosts", "pipeline/lora")


def uses_of_the_default_pool(source: str) -> Iterator[int]:
    """The lines with `to_thread(…)`, `run_in_executor(None, …)` or a loop's `getaddrinfo(…)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            is_default = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value is None
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            looks_up = name == "getaddrinfo" and not (isinstance(of, ast.Name) and of.id == "socket")
            if name == "to_thread" or (name == "run_in_executor" and is_default) or looks_up:
                yield node.lineno


def starts_a_loop(source: str) -> bool:
    """Whether a module runs uvloop's loop."""
    return "uvloop.new_event_loop" in source or "from uvloop import run" in source


def test_each_loop_of_a_server_has_pythons_lock_soon_beside_its_threads() -> None:
    """With Python's default, two threads that load adapters held up the streams of all models by 60 ms and more."""
    sources = [(path, path.read_text("utf-8")) for folder in SERVERS for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): source for path, source in sources if starts_a_loop(source)}
    assert len(found) >= 4
    assert [path for path, source in found.items() if "    share_interpreter()\n" not in source] == []


def test_no_server_process_uses_the_default_thread_pool() -> None:
    bad = "await asyncio.to_thread(f)\nloop.run_in_executor(None, f)\nto_thread(f)\nloop.getaddrinfo(a, 1)"
    assert sorted(uses_of_the_default_pool(bad)) == [1, 2, 3, 4]
    paths = [path for folder in SERVERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 300
    found = [f"{path}:{line}" for path in paths for line in uses_of_the_default_pool(path.read_text("utf-8"))]
    assert not found
