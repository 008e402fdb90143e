"""The environment of the engines that embeddings are compared with."""

import sysconfig
from pathlib import Path

from tools.compare_encoders.engines import STAMP, Engines


def test_an_environment_that_was_made_by_another_tree_shares_the_packages_of_this_one(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "engines"
    shared = folder / "venv" / "lib" / "python3.11" / "site-packages" / "shared.pth"
    onnx = folder / "onnx-model" / "model.onnx"
    for path in (shared, onnx):
        path.parent.mkdir(parents=True)
    (folder / STAMP).touch()
    onnx.touch()
    shared.write_text("/a/tree/that/is/gone\n")
    Engines(folder, model, tmp_path, lambda line: None).make()
    assert shared.read_text() == sysconfig.get_path("purelib") + "\n"
