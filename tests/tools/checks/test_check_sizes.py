"""Folders and files stay small enough to read, and the check finds those that are not."""

from pathlib import Path

from tools.check_sizes import EXCEPTIONS, MAX_FILES, MAX_LINES, ROOT, too_large


def write(root: Path, file: str, num_lines: int) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n" * num_lines)


def test_no_folder_and_no_file_is_too_large() -> None:
    assert list(too_large()) == []


def test_every_exception_is_needed() -> None:
    for pattern in EXCEPTIONS:
        files = list(ROOT.glob(pattern))
        is_long = any(path.read_bytes().count(b"\n") > MAX_LINES for path in files)
        assert is_long or len(files) > MAX_FILES, f"nothing needs {pattern}: delete the exception"


def test_a_long_file_is_found_in_any_language_but_no_data(tmp_path: Path) -> None:
    for file in (
        "stages/x/a.py",
        "kernels/cpu/a.cpp",
        "stages/x/page/static/a.js",
        "tests/x/a.py",
        "tools/a.json",
        "docs/a.py",
    ):
        write(tmp_path, file, MAX_LINES + 1)
    write(tmp_path, "stages/x/b.py", MAX_LINES)
    assert list(too_large(tmp_path)) == [
        f"{file}: 401 lines, more than 400: split it by subject"
        for file in ("kernels/cpu/a.cpp", "stages/x/a.py", "stages/x/page/static/a.js", "tests/x/a.py")
    ]


def test_a_full_folder_is_found_by_the_files_that_are_in_it_itself(tmp_path: Path) -> None:
    for i in range(MAX_FILES):
        write(tmp_path, f"stages/x/a{i}.py", 1)
        write(tmp_path, f"stages/x/y/a{i}.json", 1)
        write(tmp_path, f"stages/x/__pycache__/a{i}.pyc", 1)
        write(tmp_path, f"tests/x/a{i}.py", 1)
    assert list(too_large(tmp_path)) == []
    write(tmp_path, "stages/x/y/b.json", 1)
    write(tmp_path, "tests/x/b.py", 1)
    assert list(too_large(tmp_path)) == [
        f"{folder}: 16 files, more than 15: divide it by subject" for folder in ("stages/x/y", "tests/x")
    ]


def test_data_of_tests_is_not_counted(tmp_path: Path) -> None:
    for i in range(MAX_FILES + 1):
        write(tmp_path, f"tests/data/a{i}.json", 1)
        write(tmp_path, f"tests/data/templates/a{i}.py", MAX_LINES + 1)
    assert list(too_large(tmp_path)) == []
    write(tmp_path, "stages/data/a.py", MAX_LINES + 1)
    assert list(too_large(tmp_path)) == ["stages/data/a.py: 401 lines, more than 400: split it by subject"]


def test_headers_of_the_library_are_not_counted_and_links_are_not_followed(tmp_path: Path) -> None:
    for i in range(MAX_FILES + 1):
        write(tmp_path, f"kernels/cpu/a{i}.h", MAX_LINES + 1)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "kernels").symlink_to(tmp_path / "kernels")
    assert list(too_large(tmp_path)) == []
    write(tmp_path, "kernels/triton/a.h", MAX_LINES + 1)
    assert list(too_large(tmp_path)) == ["kernels/triton/a.h: 401 lines, more than 400: split it by subject"]
