"""Loads and unloads LoRA adapters at random moments, while requests use them."""

import asyncio
import json
import random
import time
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import orjson
from safetensors.numpy import save_file

from pipeline.cli.bench.client import message_of, reason_of
from pipeline.config.settings import Settings
from pipeline.lora.adapter_file import DTYPES
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.measuring.plain_adapter import pairs_of
from pipeline.stages.prepare.stage import prepare
from tools.benchmarks.served import Served

SETTINGS = ("lora.runtime_loading=true", "lora.max_loras=2", "lora.max_cpu_loras=3", "lora.max_lora_rank=16")
"""So few that adapters wait for each other, and take each other's slots."""
NUM = 5
RANKS = (4, 8, 16)
EVERY_S = (0.3, 3.0)
TIMEOUT_S = 60.0
"""Of a load or an unload."""
KEPT = "adapter-0"
"""It stays loaded: probes use it."""


class Adapters:
    """Random adapters, and which of them requests may use now."""

    def __init__(self, server: Served, folder: Path, seed: int) -> None:
        self._server, self._rng = server, random.Random(f"adapters/{seed}")
        self._folders = {f"adapter-{number}": folder / str(number) for number in range(NUM)}
        self.loaded: list[str] = []
        self.num_loads, self.num_unloads = 0, 0
        self.faults: list[str] = []

    def write(self, config: ModelConfig) -> None:
        """Write the adapters' folders."""
        for number, folder in enumerate(self._folders.values()):
            write_adapter(folder, config, RANKS[number % len(RANKS)], number)

    def choose(self, model: str) -> str:
        """The model's name of a request: that of the model itself, or of an adapter that is loaded."""
        return self._rng.choice((model, model, *self.loaded))

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Load the adapter that stays, and some others."""
        for name in list(self._folders)[:3]:
            await self._load(session, name)

    async def run(self, session: aiohttp.ClientSession, end_s: float) -> None:
        """Load and unload until `end_s`, by time.monotonic()."""
        while time.monotonic() < end_s:
            await asyncio.sleep(self._rng.uniform(*EVERY_S))
            name = self._rng.choice([name for name in self._folders if name != KEPT])
            if name in self.loaded:
                self.loaded.remove(name)
                if await self._call(session, "unload", {"lora_name": name}):
                    self.num_unloads += 1
            else:
                await self._load(session, name)

    async def _load(self, session: aiohttp.ClientSession, name: str) -> None:
        body = {"lora_name": name, "lora_path": str(self._folders[name]), "load_inplace": True}
        if await self._call(session, "load", body):
            self.num_loads += 1
            self.loaded.append(name)

    async def _call(self, session: aiohttp.ClientSession, what: str, body: dict[str, object]) -> bool:
        """Returns whether it was done."""
        url = f"{self._server.url}/v1/{what}_lora_adapter"
        try:
            async with asyncio.timeout(TIMEOUT_S), session.post(url, data=orjson.dumps(body)) as response:
                data = await response.read()
                if response.status == 200:
                    return True
                self.faults.append(f"{what} of an adapter: {response.status}: {message_of(data)}")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self.faults.append(f"{what} of an adapter: {reason_of(error)}")
        return False


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """An adapter in PEFT's format with random matrices, which change texts a little."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    tensors = {}
    for pair in pairs_of(config, rank, lambda shape: np.zeros(shape, DTYPES["f32"])):
        block = "mlp" if pair.target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        name = f"base_model.model.model.layers.{pair.layer}.{block}.{pair.target}"
        for part, array in (("A", pair.a), ("B", pair.b)):
            tensors[f"{name}.lora_{part}.weight"] = generator.normal(0, 0.04, array.shape).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config_json = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config_json), "utf-8")


def config_of(sets: list[str]) -> ModelConfig:
    """The config of the model that a server with these settings has."""
    given = dict(one.split("=", 1) for one in sets if one.startswith(("model=", "cache_dir=", "quantization=")))
    return ModelConfig.load(prepare(msgspec.convert(given, Settings)))
