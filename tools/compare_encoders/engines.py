"""The other engines: an environment with sentence-transformers and fastembed that shares this program's torch, and the
model's files in their forms."""

import sys
import sysconfig
from pathlib import Path

from pipeline.errors import UserError
from tools.compare_peers import children
from tools.compare_peers.children import Tell

PACKAGES = ("fastembed==0.9.1", "onnx==1.23.2", "fastapi", "uvicorn", "scikit-learn", "scipy")
ALONE = "sentence-transformers==6.2.0"
"""Installed without what it requires: that would be another torch of several gigabytes."""
STAMP = "complete"
INSTALL_S, CONVERT_S = 900.0, 600.0
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
EXPORT = """
import sys, torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager").eval()
class States(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, ids, mask, types):
        return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state
ids = torch.ones(2, 8, dtype=torch.int64)
inputs, outputs = ["input_ids", "attention_mask", "token_type_ids"], ["last_hidden_state"]
axes = {name: {0: "batch", 1: "length"} for name in inputs + outputs}
torch.onnx.export(States(), (ids, ids, ids * 0), sys.argv[2], input_names=inputs, output_names=outputs,
                  dynamic_axes=axes, dynamo=False)
"""


class Engines:
    """In a folder of the cache."""

    def __init__(self, folder: Path, model: Path, logs: Path, tell: Tell) -> None:
        self._folder, self._model, self._logs, self._tell = folder, model, logs, tell
        self.python = folder / "venv" / "bin" / "python"
        self.onnx = folder / f"onnx-{model.name}"

    def make(self) -> None:
        """Install, and write the model in ONNX. Raises UserError."""
        if not (self._folder / STAMP).is_file():
            self._tell(f"installing {ALONE} and {', '.join(PACKAGES)} in {self._folder}")
            self._run("environment", [sys.executable, "-m", "venv", str(self._folder / "venv")])
            pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            self._run("packages", [*pip, *PACKAGES])
            self._run("sentence-transformers", [*pip, "--no-deps", ALONE])
            (self._folder / STAMP).touch()
        (site,) = (self._folder / "venv").glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")  # the last one's may be gone
        if not (self.onnx / "model.onnx").is_file():
            self.onnx.mkdir(parents=True, exist_ok=True)
            for name in TOKENIZER_FILES:
                if (self._model / name).is_file():
                    (self.onnx / name).write_bytes((self._model / name).read_bytes())
            self._run("onnx", [str(self.python), "-c", EXPORT, str(self._model), str(self.onnx / "model.onnx")])

    def gguf(self, source: Path, kind: str) -> Path:
        """The model as a .gguf file of f32 or bf16, by llama.cpp's own program. Raises UserError."""
        path = self._folder / f"{self._model.name}-{kind}.gguf"
        if not path.is_file():
            command = [sys.executable, str(source / "convert_hf_to_gguf.py"), str(self._model), "--outtype", kind]
            env = {"PYTHONPATH": str(source / "gguf-py")}
            children.run(
                f"gguf {kind}",
                [*command, "--outfile", str(path)],
                self._logs / f"gguf-{kind}.log",
                CONVERT_S,
                self._tell,
                env=env,
            )
        return path

    def _run(self, name: str, command: list[str]) -> None:
        children.run(name, command, self._logs / f"{name}.log", INSTALL_S, self._tell)


def require_model(model: Path) -> None:
    """Raise UserError unless the folder is one of a BERT model with what every engine needs."""
    for name in ("config.json", "tokenizer.json", "model.safetensors", "modules.json"):
        if not (model / name).is_file():
            raise UserError(f"{model}: needs {name}: name the folder of a sentence-transformers model such as MiniLM")
