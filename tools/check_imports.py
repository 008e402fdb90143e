"""Checks every file's imports against the table in docs/architecture.md.

Imports inside functions and under TYPE_CHECKING count, relative imports are resolved, and literal calls of
`import_module` are found. Each wrong import is reported as a line `file:line: reason`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

FOLDERS = ("config", "shm", "kernels", "pipeline", "stages")
CHECKED = (*FOLDERS, "tests", "tools")
LINKED = ("config", "shm", "kernels", "stages")
"""Folders that are imported below `pipeline`. Other packages use their bare names."""

TRANSFORMERS = ("transformers", "huggingface_hub")
CALLS = (b"import_module", b"__import__")
"""Functions that import."""
TORCH = ("torch", "safetensors.torch")
"""Modules that import torch."""

EXECUTE = "pipeline.stages.execute"
BACK_ENDS = ("cpu", "cuda")
"""Folders of execute. Models, layers and everything else that both need import neither, and they don't import each
other."""
STARTERS = ("stage", "measuring.check", "measuring.profile")
"""The modules of execute that start a back end. Back ends don't import them."""


FLOORS = (
    ("errors", "own_files", "version"),
    ("metrics", "torch_needed"),
    ("runtime",),
    ("client", "lora", "media", "replay", "routing", "text"),
    ("grammars", "http_server"),
    ("supervisor",),
    ("hosts",),
    ("deploy",),
    ("cli",),
    ("__init__", "__main__"),
)
"""The folders and files in `pipeline`, from the ground up. Each imports only what is on a lower floor."""

EXCEPTIONS = {
    "pipeline/client/embedded/entry.py": ("cli", "supervisor"),
    "pipeline/supervisor/processes/children.py": ("hosts",),
    "pipeline/supervisor/loop.py": ("hosts",),
    "pipeline/supervisor/supervisor.py": ("hosts",),
    "pipeline/text/formats/grammar/own_syntax.py": ("grammars",),
}
"""Files, and what they import from their own floor or a higher one. `unused_exceptions` names those to delete."""

_FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}


class Rules(NamedTuple):
    """The project's modules that a folder may import, and foreign modules that it must not. Prefixes of dotted
    names."""

    ours: tuple[str, ...]
    never: tuple[str, ...]


class Import(NamedTuple):
    """The dotted name of an import, and its line."""

    target: str
    line: int


def rules_of(room: str) -> Rules:
    """The rules of a folder: a top-level folder, or `stages.x`."""
    match room.split("."):
        case ["config" | "shm"]:
            return Rules((f"pipeline.{room}",), (*TORCH, "zmq", "aiohttp", *TRANSFORMERS))
        case ["kernels"]:
            return Rules(("pipeline.kernels", "pipeline.own_files"), ("zmq", "aiohttp", *TRANSFORMERS))
        case ["pipeline"]:
            return Rules(("pipeline.config", "pipeline.shm", "pipeline"), (*TORCH, *TRANSFORMERS))
        case ["stages", stage]:
            ours = ("pipeline.config", "pipeline.shm", "pipeline", f"pipeline.stages.{stage}")
            match stage:
                case "execute":
                    return Rules((*ours, "pipeline.kernels"), TRANSFORMERS)
                case "prepare":
                    return Rules(ours, ())
                case _:
                    return Rules(ours, (*TORCH, *TRANSFORMERS))
    raise ValueError(f"no such room: {room}")


def wrong_imports(root: Path = ROOT) -> list[str]:
    """Every import that the table does not allow, as `file:line: reason`."""
    return [
        f"{path.relative_to(root)}:{found.line}: {fault}"
        for folder in CHECKED
        for path in _files(root / folder)
        for found in imports_of(path.read_bytes(), _package(path, root), str(path))
        if (fault := _fault_of(found.target, path, root))
    ]


def unused_exceptions(root: Path = ROOT) -> list[str]:
    """The exceptions that no import needs any more."""
    return [
        f"tools/check_imports.py: {file} no longer imports {upper}: delete the exception"
        for file, uppers in EXCEPTIONS.items()
        for upper in sorted(set(uppers) - _imported_above(root / file, root))
    ]


def _imported_above(path: Path, root: Path) -> set[str]:
    """The names in `FLOORS` that a file imports from its own floor or a higher one."""
    if not path.exists():
        return set()
    found = imports_of(path.read_bytes(), _package(path, root), str(path))
    return {upper for one in found if (upper := _above(one.target, path.relative_to(root)))}


def _fault_of(target: str, path: Path, root: Path) -> str | None:
    """Why a file must not import a name; None if it may."""
    path_in_tree = path.relative_to(root)
    return (
        _fault(target, _room(path, root)) or _floor_fault(target, path_in_tree) or _back_end_fault(target, path_in_tree)
    )


def imports_of(source: bytes, package: str, name: str = "<source>") -> Iterator[Import]:
    """All imports of a file in the dotted `package`, as absolute names. `name` is shown if it is no Python."""
    tree = ast.parse(source, name)
    nodes = ast.walk(tree) if any(name in source for name in CALLS) else _statements(tree)
    for node in nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, node.lineno)
            case ast.ImportFrom():
                base = _absolute(node, package)
                for alias in node.names:
                    yield Import(base if alias.name == "*" else f"{base}.{alias.name}", node.lineno)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _imports(function):
                yield Import(name, node.lineno)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, also those in others. Most nodes of a tree are expressions, which take long to walk through."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            value = getattr(node, part, None)
            if isinstance(value, list):  # of a lambda or a ternary, `body` is an expression
                nodes += value


def _files(folder: Path) -> list[Path]:
    """Python files below a folder, including scripts without a suffix. Links are not followed."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not _through_link(path, folder) and (path.suffix == ".py" or _is_script(path))
    )


def _through_link(path: Path, folder: Path) -> bool:
    return any(parent.is_symlink() for parent in (path, *path.parents) if folder in parent.parents)


def _is_script(path: Path) -> bool:
    if path.suffix:
        return False
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and b"python" in first


def _package(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parent.parts
    return ".".join(("pipeline", *parts) if parts[0] in LINKED else parts)


def _room(path: Path, root: Path) -> str:
    folder, *below = path.relative_to(root).parts
    return f"stages.{below[0]}" if folder == "stages" and len(below) > 1 else folder


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - (node.level - 1)])
    return f"{base}.{node.module}" if node.module else base


def _imports(function: ast.expr) -> bool:
    match function:
        case ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"):
            return True
    return False


def _fault(target: str, room: str) -> str | None:
    """Why a folder must not import a name; None if it may."""
    top = target.partition(".")[0]
    if top in LINKED:
        return f"imports {target}; write pipeline.{target}"
    if room in ("tests", "tools"):
        return None
    if room == "stages":
        return f"stages imports {target}; only the folders in it hold code"
    rules = rules_of(room)
    if banned := _match(target, rules.never):
        return f"{room} never imports {banned}"
    if top in ("tests", "tools"):
        return f"{room} never imports {top}"
    if top == "pipeline" and not any(_is_ours(target, allowed) for allowed in rules.ours):
        return f"{room} may not import {target}"
    return None


def _above(target: str, path: Path) -> str:
    """What a file of `pipeline` imports by this name from its own floor or a higher one; empty if it may."""
    folder, *below = path.with_suffix("").parts
    top, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    if folder != "pipeline" or top != "pipeline" or name == below[0] or name in LINKED:
        return ""
    own, upper = _FLOOR_OF.get(below[0]), _FLOOR_OF.get(name)
    return name if own is not None and upper is not None and upper >= own else ""


def _floor_fault(target: str, path: Path) -> str | None:
    """Why a file of `pipeline` must not import a name of a higher floor; None if it may."""
    upper = _above(target, path)
    if not upper or upper in EXCEPTIONS.get(path.as_posix(), ()):
        return None
    return f"pipeline/{path.with_suffix('').parts[1]} may not import {target}: {upper} is on no lower floor"


def _back_end_fault(target: str, path: Path) -> str | None:
    """Why a file of execute must not import a name of a back end; None if it may."""
    if path.parts[:2] != ("stages", "execute"):
        return None
    module = ".".join(path.with_suffix("").parts[2:])
    for back_end in BACK_ENDS:
        if _within(module, back_end):
            others = (*(other for other in BACK_ENDS if other != back_end), *STARTERS)
            return _back_end_fault_of(module, target, others)
    return None if module in STARTERS else _back_end_fault_of(module, target, BACK_ENDS)


def _back_end_fault_of(module: str, target: str, others: tuple[str, ...]) -> str | None:
    banned = _match(target, tuple(f"{EXECUTE}.{other}" for other in others))
    return f"stages.execute.{module} never imports {banned}" if banned else None


def _is_ours(target: str, allowed: str) -> bool:
    """Whether a name is allowed. `pipeline` means that folder without the folders linked into it."""
    if allowed != "pipeline":
        return _within(target, allowed)
    return _match(target, tuple(f"pipeline.{folder}" for folder in LINKED)) is None


def _match(target: str, prefixes: tuple[str, ...]) -> str | None:
    return next((prefix for prefix in prefixes if _within(target, prefix)), None)


def _within(target: str, prefix: str) -> bool:
    return target == prefix or target.startswith(prefix + ".")


if __name__ == "__main__":
    faults = wrong_imports() + unused_exceptions()
    print("\n".join(faults) if faults else "all imports follow the table")
    sys.exit(1 if faults else 0)
