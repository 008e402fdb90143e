"""Every place that makes, writes, renames or removes a file by its path is listed, with the reason why no other user of
the machine chooses where that leads. A new one uses pipeline/own_files.py or pipeline/cli/out_file.py, or is added."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pipeline", "stages", "shm", "kernels", "tools", "config")
# fmt: off
CALLS = frozenset((
    "write_text", "write_bytes", "mkdir", "makedirs", "touch", "symlink_to", "hardlink_to", "symlink", "link",
    "rmdir", "unlink", "rename", "renames", "chmod", "lchmod", "chown", "lchown", "utime", "truncate",
    "mkfifo", "mknod", "mktemp", "rmtree", "copyfile", "copy2", "copytree", "move", "save_file", "tofile",
    "extractall",
))
# fmt: on
"""Functions and methods by their last name. tempfile's others make new names in folders of mode 0700 by themselves."""
OF_OS = frozenset(("remove", "replace", "removedirs"))
"""Names that are others' too: counted with `os` before them, and `replace` also with one argument, as of a Path."""
LOOKED_AT = (ast.Call, ast.Attribute)
FLAGS = frozenset(("O_CREAT", "O_TMPFILE", "O_TRUNC", "O_WRONLY", "O_RDWR"))
MAY_WRITE = re.compile(rf"\b(?:(?:{'|'.join(sorted(CALLS | OF_OS | {'open'}))})\s*\(|(?:{'|'.join(sorted(FLAGS))})\b)")
"""What the source of a module has that does any of this. Others are not parsed, which takes longer."""
REASONS: dict[str, dict[str, str]] = {
    "The modules that have the rule.": {
        "pipeline/cli/out_file.py": "O_CREAT*2 O_WRONLY*3 replace unlink*3",
        "pipeline/own_files.py": "O_CREAT*2 O_RDWR*2 chmod mkdir*4",
        "pipeline/runtime/files/private_files.py": "O_CREAT O_RDWR O_TMPFILE O_WRONLY*2 unlink*2",
    },
    "Inside an `OpenFolder`, or relative to its descriptor.": {
        "pipeline/cli/cache/entries.py": "rmtree unlink*2",
        "pipeline/lora/adapter_file.py": "open replace unlink*2",
        "pipeline/runtime/log/log_file.py": "O_CREAT O_WRONLY rename",
        "pipeline/runtime/model/weight_headers.py": "open replace unlink",
        "pipeline/supervisor/crashes/crash_reports.py": "mkdir rename rmtree*2",
        "stages/execute/cpu/native/panel_file.py": "O_RDWR O_TMPFILE link unlink",
        "stages/prepare/adapters.py": "unlink",
        "stages/prepare/cache.py": "open rename*2 rmtree unlink*3 utime",
        "stages/prepare/drafts/draft.py": "replace symlink_to",
        "kernels/cpu/build.py": "chmod open replace rmtree*3 unlink*5 utime",
        "kernels/cpu/library_file.py": "open",
    },
    "In the folder that `Cache.ensure` fills: it is open, and only its user can enter it.": {
        "pipeline/runtime/model/generation_config.py": "write_bytes",
        "pipeline/runtime/model/in_place.py": "write_bytes",
        "pipeline/runtime/model/vocabulary_size.py": "write_bytes",
        "pipeline/text/formats/added_tokens.py": "open",
        "stages/prepare/encoders/pair_templates.py": "write_bytes",
        "stages/prepare/encoders/pooler.py": "save_file",
        "stages/prepare/gguf/model.py": "write_text*3",
        "stages/prepare/tokenizers/given_template.py": "unlink",
        "stages/prepare/sharing.py": "copyfile*2 link unlink*2",
        "stages/prepare/sources/chat_templates.py": "write_bytes",
        "stages/prepare/sources/folder.py": "write_text",
        "stages/prepare/sources/tokenizer_json.py": "write_bytes*2",
        "stages/prepare/sources/wheel.py": "mkdir*4 open rmtree*2",
        "stages/prepare/weights/weight_file.py": "open",
    },
    "Of something that is no file.": {
        "stages/ingest/prompts/prompt_processor.py": "truncate",
    },
    "In a folder that tempfile has made for this process, with mode 0700.": {
        "pipeline/cli/check/command.py": "mkdir",
        "pipeline/hosts/own_ray.py": "O_CREAT O_WRONLY rmtree",
        "stages/prepare/check_model/random_checkpoint.py": "write_text",
        "tools/check_aarch64/__main__.py": "mkdir",
        "tools/compare_dinov2/__main__.py": "save_file",
        "tools/fuzzing/models.py": "mkdir*2 save_file*5 write_text*5",
        "tools/fuzzing/mutations.py": "mkfifo symlink_to*3 unlink write_bytes*3",
        "tools/gpu_check/models.py": "mkdir*4 save_file*3 write_text*2",
        "tools/gpu_check/servers/features.py": "link mkdir symlink_to",
        "tools/gpu_check/servers/ranks.py": "mkdir write_text",
        "tools/soak/adapters.py": "mkdir save_file write_text",
        "tools/soak/turns/server.py": "mkdir write_text",
    },
    "A file of the kernel or a device: /dev/null, /proc.": {
        "kernels/cpu/compile_ahead.py": "write_bytes",
        "pipeline/__main__.py": "O_WRONLY",
        "pipeline/runtime/security/api_keys.py": "write_text",
        "stages/execute/cuda/ranks/board.py": "O_RDWR",
        "tools/simulator/__main__.py": "O_WRONLY",
    },
    "Not about files.": {
        "pipeline/supervisor/restart/planned_restarts.py": "replace",
        "pipeline/supervisor/shared/resources.py": "replace",
        "pipeline/supervisor/restart/restarts.py": "replace",
        "stages/execute/cpu/runner.py": "link",
        "stages/gateway/replayed.py": "move",
        "stages/schedule/lifecycle.py": "replace",
        "kernels/cpu/native_library.py": "touch",
    },
    "A tool of developers: in the clone, or in a folder that its user has made for it.": {
        "kernels/triton/gemm/tuned.py": "mkdir write_text",
        "tools/check_words.py": "write_text",
        "tools/compare_encoders/__main__.py": "write_text*2",
        "tools/compare_encoders/engines.py": "mkdir touch write_bytes write_text",
        "tools/compare_peers/children.py": "mkdir open",
        "tools/compare_peers/llama_cpp.py": "extractall rename rmtree*3 write_bytes write_text",
        "tools/compare_peers/measure.py": "mkdir unlink",
        "tools/compare_peers/model.py": "mkdir*2 symlink_to unlink write_text",
        "tools/compare_peers/parent.py": "mkdir",
        "tools/compare_peers/vllm_cpu.py": "mkdir write_bytes write_text",
        "tools/export_protocol/__main__.py": "mkdir write_text",
        "tools/models/fetch_test_embedders.py": "mkdir open rename",
        "tools/models/fetch_test_models.py": "mkdir",
        "tools/fuzzing/cases.py": "mkdir",
        "tools/fuzzing/fuzz_images.py": "write_bytes",
        "tools/fuzzing/fuzz_model_files.py": "copyfile copytree*2 mkdir*2 open rmtree*2",
        "tools/gpu_check/parent.py": "mkdir",
        "tools/gpu_check/readings.py": "open",
        "tools/tokenizer_vectors/__main__.py": "write_text",
    },
    "The hub's own cache, HF_HUB_CACHE, which huggingface_hub and other programs write in the same way.": {
        "stages/prepare/sources/hub/download.py": "link mkdir*3 open rename replace*2 symlink_to truncate*3 unlink*3",
        "stages/prepare/sources/hub/local.py": "rename rmtree*2",
    },
    "The time of use of a prepared adapter.": {"pipeline/lora/convert.py": "utime"},
    "`ModelConfig.save` writes in the folder that is filled.": {
        "pipeline/runtime/model/model_config.py": "write_bytes"
    },
    "So do those of media.json and vision.json.": {
        "pipeline/media/config.py": "write_bytes",
        "pipeline/runtime/model/vision_config.py": "write_bytes",
    },
    "`is_held` opens a stamp for its lock, not over a link.": {"pipeline/runtime/model/model_folder.py": "O_RDWR"},
    "A stale socket's own name, not where a link leads (docs/security.md says which folder to use).": {
        "stages/gateway/zmq/bind.py": "unlink",
        "stages/gateway/zmq/listener.py": "unlink",
    },
    "The digest of a model, in the folder that is filled; `draft.link` links in an open folder.": {
        "stages/prepare/stage.py": "link*2 write_text"
    },
}
"""By reason: the files, and what they do how often."""


def writes(source: str) -> Counter[str]:
    """How often a module does what."""
    if not MAY_WRITE.search(source):
        return Counter()
    tree = ast.parse(source)
    return Counter(name for node in ast.walk(tree) if isinstance(node, LOOKED_AT) for name in _written(node))


def _written(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in FLAGS:
            yield name
        case ast.Call(func=ast.Name(id="open"), args=args) if _is_written(node, args[1:2]):
            yield "open"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="open" | "fdopen")):
            pass  # its flags are counted
        case ast.Call(func=ast.Attribute(attr="open"), args=args) if _is_written(node, args[:1]):
            yield "open"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr=name)) if name in OF_OS:
            yield name
        case ast.Call(func=ast.Attribute(attr="replace"), args=[_], keywords=[]):
            yield "replace"
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in CALLS:
            yield name


def _is_written(call: ast.Call, mode: list[ast.expr]) -> bool:
    """Whether a mode is, or may be, one of writing."""
    given = [*mode, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [one.value for mode in given for one in ast.walk(mode) if isinstance(one, ast.Constant)]
    return any(isinstance(one, str) and set(one) <= set("rwaxbt+") and set(one) & set("wax+") for one in modes)


def _listed() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for files in REASONS.values():
        for file, calls in files.items():
            assert file not in found, f"{file} is listed twice"
            parts = (call.partition("*") for call in calls.split())
            found[file] = Counter({name: int(times or 1) for name, _, times in parts})
    return found


def test_every_place_that_writes_is_listed() -> None:
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            is_linked = any(one.is_symlink() for one in (path, *path.parents) if one.is_relative_to(ROOT / folder))
            if not is_linked and (calls := writes(path.read_text("utf-8"))):
                found[str(path.relative_to(ROOT))] = calls
    listed = _listed()
    for file in sorted(found.keys() | listed.keys()):
        assert found.get(file) == listed.get(file), f"{file}: use own_files or out_file, or list it with its reason"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("open(path, 'w')", "open"),
        ("open(path, mode='r+b')", "open"),
        ("path.open('ab')", "open"),
        ("path.open('x' if is_new else 'w')", "open"),
        ("import os\nflags = os.O_CREAT", "O_CREAT"),
        ("Path(a).write_bytes(data)", "write_bytes"),
        ("folder.mkdir(parents=True, exist_ok=True)", "mkdir"),
        ("partial.replace(path)", "replace"),
        ("os.replace(a, b)", "replace"),
        ("os.remove(a)", "remove"),
        ("shutil.rmtree(folder)", "rmtree"),
        ("from shutil import copytree\ncopytree(a, b)", "copytree"),
    ],
)
def test_writing_is_found(source: str, name: str) -> None:
    assert writes(source) == {name: 1}


@pytest.mark.parametrize(
    "source",
    [
        "path.open('rb')",
        "open(path)",
        "text.replace('a', 'b')",
        "replace(struct, a=1)",
        "names.remove(a)",
        "x.open(path)",
    ],
)
def test_reading_is_not(source: str) -> None:
    assert not writes(source)
