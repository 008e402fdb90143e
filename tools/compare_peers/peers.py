"""The servers: how each is started, and what it is compared with. `{port}` in a command is replaced by a free port."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tools.compare_peers.model import NAME, ModelPaths

PIPELINE_START_S = 300.0
"""The first start downloads and converts the model, and compiles kernels."""
LLAMA_CPP_START_S = 120.0
VLLM_START_S = 900.0
"""It compiles the model with torch.compile: about 100 s on two cores, on the first start and on later ones."""
NUM_SLOTS = 32
SLOT_TOKENS = 2048
"""llama.cpp divides its context evenly among its slots. The longest request has about 1,100 tokens, unless longer
prompts arrive."""
VLLM_KV_GIB = 4

LLAMA_CPP, VLLM = "llama.cpp", "vllm"


class Peer(msgspec.Struct, frozen=True):
    """A server to measure."""

    name: str
    """In --servers, in file names and in the JSON."""
    label: str
    """In tables and in the chart."""
    command: list[str]
    env: dict[str, str]
    start_s: float
    """Deadline for /health to answer 200."""
    rival: str | None
    """The name of the server that serves the same weights; ratios are to that one."""


NAMES = {
    "pipeline": "Pipeline with the file's own weights",
    "pipeline-int8": 'the same with execute.activations = "int8"',
    "pipeline-int12": 'the same with execute.activations = "int12"',
    "pipeline-throughput": "the same with --config throughput, which also sets int8",
    "pipeline-bf16": "Pipeline with quantization = none",
    LLAMA_CPP: "llama.cpp's server with the same .gguf file",
    VLLM: "vLLM's CPU build with the same weights in bfloat16",
}
DEFAULT = ("pipeline", "pipeline-int8", "pipeline-bf16", LLAMA_CPP, VLLM)


class Programs(msgspec.Struct, frozen=True):
    """The programs of the other servers."""

    llama_server: Path
    vllm_python: Path


def peers_of(
    names: Sequence[str], model: str, weights: str, paths: ModelPaths, programs: Programs, longest_tokens: int = 0
) -> list[Peer]:
    """The chosen servers. `weights` is the format of the .gguf file's weights, for the labels, and `longest_tokens` the
    length of the longest request, if llama.cpp's slots may be too small for it."""
    slot_tokens = max(SLOT_TOKENS, -(-longest_tokens // 256) * 256)
    cores = sorted(os.sched_getaffinity(0))
    serve = [sys.executable, "-m", "pipeline", "serve", "--port", "{port}", "--model", model]
    serve += ["--set", f"served_model_name={NAME}"]

    def ours(name: str, label: str, rival: str, *options: str) -> Peer:
        return Peer(name, f"Pipeline {label}", [*serve, *options], {}, PIPELINE_START_S, rival)

    known = [
        ours("pipeline", weights, LLAMA_CPP),
        ours("pipeline-int8", f"{weights}, int8", LLAMA_CPP, "--set", "execute.activations=int8"),
        ours("pipeline-int12", f"{weights}, int12", LLAMA_CPP, "--set", "execute.activations=int12"),
        ours("pipeline-throughput", f"{weights}, throughput", LLAMA_CPP, "--config", "throughput"),
        ours("pipeline-bf16", "bf16", VLLM, "--set", "quantization=none"),
        Peer(
            LLAMA_CPP,
            f"llama.cpp {weights}",
            [
                *(str(programs.llama_server), "--model", str(paths.gguf), "--alias", NAME),
                *("--host", "127.0.0.1", "--port", "{port}"),
                *("--threads", str(len(cores)), "--threads-batch", str(len(cores))),
                *("--parallel", str(NUM_SLOTS), "--ctx-size", str(NUM_SLOTS * slot_tokens)),
            ],
            {},
            LLAMA_CPP_START_S,
            None,
        ),
        Peer(
            VLLM,
            "vLLM bf16",
            [
                *(str(programs.vllm_python), "-m", "vllm.entrypoints.cli.main", "serve", str(paths.folder)),
                *("--served-model-name", NAME, "--dtype", "bfloat16"),
                *("--host", "127.0.0.1", "--port", "{port}"),
            ],
            {
                "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            VLLM_START_S,
            None,
        ),
    ]
    return [peer for peer in known if peer.name in names]
