"""Tokens a CPU second of one thread, and requests a second of a server, beside other engines.

    python -m tools.compare_encoders MODEL            MODEL: the folder of a sentence-transformers model (MiniLM)
    python -m tools.compare_encoders MODEL --rounds 3 --seconds 8 --json results.json

Engines take turns. A tokens figure is of one thread, and counts the CPU time of all processes: for servers that of the
gateway and so on too, but not the client's; sentence-transformers and fastembed embed in their own process, without a
server, all on equal texts, one at a time and in batches. With the servers, 32 clients send one short text each.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError
from tools.compare_encoders import clients
from tools.compare_encoders.engines import Engines, require_model
from tools.compare_encoders.texts import Texts
from tools.compare_peers import children
from tools.compare_peers.llama_cpp import VERSION, LlamaCpp

LENGTHS = {"short": 25, "medium": 154}
BATCHES = {"one at a time": 1, "in batches": 32}
"""What an engine embeds at once; a request to a server has 1 or INPUTS."""
NUM_TEXTS = 128
INPUTS, CLIENTS = 64, 32
READY_S, WARM_S = 180.0, 2.0
FIGURE = "{} texts, {}: tokens a CPU second"
OFFLINE = {
    "sentence-transformers float32": "float32",
    "sentence-transformers bf16": "bfloat16",
    "fastembed": "fastembed",
}
HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "pipeline" / "peers")
    parser.add_argument("--logs", type=Path, default=Path("encoders-logs"))
    parser.add_argument("--only", nargs="*", help="engines by a part of their names")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        require_model(args.model)
        report(Comparison(args).run(), args.json)
    except UserError as error:
        print(f"compare_encoders: error: {error}", file=sys.stderr)
        return 1
    return 0


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model: Path = args.model.resolve()
        self.logs: Path = args.logs.resolve()
        self.llama = LlamaCpp(args.cache, VERSION)
        self.engines = Engines(args.cache / "encoders", self.model, self.logs, tell)
        self.texts = {name: Texts(self.model / "tokenizer.json", num, NUM_TEXTS) for name, num in LENGTHS.items()}
        self.found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.vectors: dict[str, Any] = {}

    def run(self) -> "Comparison":
        self.engines.make()
        self.llama.make(self.logs, tell)
        ggufs = {kind: self.engines.gguf(self.llama.server.parents[2] / "source", kind) for kind in ("f32", "bf16")}
        for number in range(self.args.rounds):
            tell(f"round {number + 1} of {self.args.rounds}")
            self._serve("Pipeline", self._pipeline(1))
            for kind, path in ggufs.items():
                self._serve(f"llama.cpp {kind}", self._llama(path, 1))
            for name, engine in OFFLINE.items():
                self._offline(name, engine)
            self._serve("Pipeline, server", self._pipeline(2), as_server=True)
            self._serve("llama.cpp bf16, server", self._llama(ggufs["bf16"], 2), as_server=True)
            fastembed = [
                str(self.engines.python),
                str(HERE / "fastembed_server.py"),
                str(self.engines.onnx),
                "{port}",
                "2",
            ]
            self._serve("fastembed, server", fastembed, as_server=True)
        return self

    def _pipeline(self, threads: int) -> list[str]:
        rules = {"gateway.port": "{port}", "execute.num_threads": threads, "gateway.host": "127.0.0.1"}
        return [sys.executable, "-m", "pipeline", "serve", str(self.model)] + [
            word for key, value in rules.items() for word in ("--set", f"{key}={value}")
        ]

    def _llama(self, path: Path, threads: int) -> list[str]:
        words = [str(self.llama.server), "-m", str(path), "--embeddings", "--port", "{port}", "-t", str(threads)]
        return [*words, "-tb", str(threads), "-c", "8192", "-b", "8192", "-ub", "8192", "-np", "16"]

    def _is_wanted(self, name: str) -> bool:
        return not self.args.only or any(part.lower() in name.lower() for part in self.args.only)

    @contextlib.contextmanager
    def _serving(self, name: str, command: Sequence[str]) -> Iterator[children.Serving]:
        log = self.logs / f"{name.replace(' ', '-').replace(',', '')}.log"
        with children.serving(name, command, log, READY_S, tell) as serving:
            yield serving

    def _serve(self, name: str, command: Sequence[str], as_server: bool = False) -> None:
        if not self._is_wanted(name):
            return
        with self._serving(name, command) as serving:
            if as_server:
                load = self._load(serving, "short", CLIENTS, 1)
                self._note("requests/s", name, load.per_s)
                self._note("CPU ms a request", name, load.cpu_s * 1000)
                return
            for length in self.texts:
                for how, batch in BATCHES.items():
                    load = self._load(serving, length, 1, 1 if batch == 1 else INPUTS)
                    self._note(FIGURE.format(length, how), name, 1 / load.token_cpu_s)
                    self.vectors.setdefault(name, load.vectors)

    def _load(self, serving: children.Serving, length: str, num_clients: int, inputs: int) -> clients.Load:
        texts, seconds = self.texts[length], self.args.seconds
        return asyncio.run(
            clients.load(serving.url, serving.pid, self.model.name, texts, num_clients, inputs, WARM_S, seconds)
        )

    def _offline(self, name: str, engine: str) -> None:
        if not self._is_wanted(name):
            return
        for length, texts in self.texts.items():
            file, log = self.logs / f"texts-{length}.json", self.logs / f"{engine}-{length}.log"
            file.write_text(json.dumps(texts.texts))
            model = self.engines.onnx if engine == "fastembed" else self.model
            command = [str(self.engines.python), str(HERE / "offline.py"), engine, str(model), str(file)]
            env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            for how, batch in BATCHES.items():
                children.run(name, [*command, str(self.args.seconds), str(batch)], log, READY_S, tell, env=env)
                found = json.loads(log.read_text().splitlines()[-1])
                self._note(FIGURE.format(length, how), name, sum(texts.num_tokens) / found["cpu_s"])
                self.vectors.setdefault(name, found["vectors"])

    def _note(self, what: str, name: str, value: float) -> None:
        self.found[what][name].append(value)
        tell(f"  {name}: {value:,.2f} {what}")


def report(comparison: Comparison, path: Path | None) -> None:
    """Medians, and ours divided by each."""
    for what, by_name in comparison.found.items():
        medians = {name: statistics.median(values) for name, values in by_name.items()}
        ours = next((value for name, value in medians.items() if name.startswith("Pipeline")), None)
        print(f"\n{what}")
        for name, value in medians.items():
            ratio = "" if ours is None else f"  {ours / value:6.2f} x"
            print(f"  {name:32} {value:12,.2f}{ratio}   {min(by_name[name]):,.2f} to {max(by_name[name]):,.2f}")
    if (reference := comparison.vectors.get("sentence-transformers float32")) is not None:
        print("\nsmallest cosine with sentence-transformers in float32")
        for name, vectors in comparison.vectors.items():
            one, other = np.array(vectors, np.float64), np.array(reference, np.float64)
            cosines = (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)
            print(f"  {name:32} {cosines.min():.6f}")
    if path is not None:
        path.write_text(json.dumps(comparison.found, indent=1))


def tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
