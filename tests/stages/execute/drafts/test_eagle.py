"""An EAGLE head proposes what its formula says, and changes no text. The heads are random: none can be had here."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings, SpeculativeSettings
from pipeline.kernels.cpu.build import default_cache_root
from pipeline.kernels.step_inputs import block_bytes
from pipeline.stages.execute.cpu.drafts.eagle import EagleHead
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.prepare.drafts import draft
from pipeline.stages.prepare.drafts.eagle import prepare_head
from pipeline.stages.prepare.progress import Lines
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import SILENT
from tests.stages.execute import checkpoints
from tests.stages.execute.drafts.proposals import expect_formula, proposals
from tests.stages.execute.native_driver import random_ids, write
from tests.stages.execute.pair import GREEDY, NUM_THREADS, Pair, Request, make_runner

CONFIG = checkpoints.config_of()
HEAD: dict[str, Any] = {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": CONFIG.hidden_size,
    "vocab_size": CONFIG.vocab_size,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


HEADS: dict[CpuRunner, Path] = {}


def write_head(folder: Path, **changes: Any) -> Path:
    """A random head, as vLLM reads it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HEAD | changes))
    hidden, generator = (HEAD | changes)["hidden_size"], torch.Generator().manual_seed(3)
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (48, hidden),
        "layers.0.self_attn.k_proj": (16, hidden),
        "layers.0.self_attn.v_proj": (16, hidden),
        "layers.0.self_attn.o_proj": (hidden, 48),
        "layers.0.mlp.gate_proj": (64, hidden),
        "layers.0.mlp.up_proj": (64, hidden),
        "layers.0.mlp.down_proj": (hidden, 64),
    }
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write(folder, CONFIG)
    return folder


@pytest.fixture(scope="module", params=["auto", "torch"])
def runners(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[CpuRunner]]:
    """One without speculation, and one with a head and little memory."""
    is_torch = request.param == "torch"
    how: dict[str, Any] = {"kernels": request.param, "dtype": "float32" if is_torch else "bfloat16"}
    num_bytes = block_bytes(3, 2, 16, 4 if is_torch else 2)
    head_bytes = block_bytes(1, 1, 16, 4 if is_torch else 2)
    root = tmp_path_factory.mktemp("cache")
    head = write_head(root / "head")
    settings = Settings(
        model=str(folder),
        cache_dir=str(root),
        execute=ExecuteSettings(kv_cache_bytes=20 * (num_bytes + head_bytes), num_threads=NUM_THREADS, **how),
        schedule=ScheduleSettings(max_num_seqs=16, max_num_batched_tokens=256),
        speculative=SpeculativeSettings(method="eagle", draft=str(head), num_speculative_tokens=4),
    )
    kernels = default_cache_root() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (root / "kernels").symlink_to(kernels)  # to compile nothing again
    draft.link(settings, prepare_head(settings, folder, SILENT), SILENT)
    speculating = CpuRunner(settings, folder, memoryview(bytearray(8 * num_bytes)))
    HEADS[speculating] = head
    assert speculating.facts.num_blocks == 20  # of both caches
    plain = make_runner(folder, num_bytes, 160, **how)
    yield [plain, speculating]
    plain.close()
    speculating.close()


def proposed_by_formula(ids: list[int], folder: Path, head: Path, num: int) -> list[int]:
    """The ids that a head proposes greedily after these, in float32 with transformers' layers."""
    model = checkpoints.reference_model(CONFIG)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    tensors = {name: tensor.float() for name, tensor in load_file(head / "model.safetensors").items()}
    shape = {key: value for key, value in HEAD.items() if key not in ("architectures", "model_type")}
    layers = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).model.float().eval()
    own = {name.removeprefix("layers."): tensor for name, tensor in tensors.items() if name != "fc.weight"}
    missing, unexpected = layers.layers.load_state_dict(own, strict=False)
    assert missing == ["0.input_layernorm.weight"] and not unexpected
    layers.layers[0].input_layernorm = layers.norm = torch.nn.Identity()
    found: list[int] = []
    with torch.inference_mode():
        states = model.model(torch.tensor([ids])).last_hidden_state[0, :-1]
        for _ in range(num):
            embedded = model.model.embed_tokens(torch.tensor([*ids[1:], *found]))
            x = functional.linear(torch.cat((embedded, states), -1), tensors["fc.weight"])
            last = layers(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            found.append(int(model.lm_head(last).argmax()))
            states = torch.cat((states, last))
    return found


def test_a_head_proposes_what_its_formula_says(
    runners: list[CpuRunner], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ids are sampled than proposed."""
    _, runner = runners
    made = [Request(tuple(random_ids(70, 1)), 12), Request(tuple(random_ids(5, 2)), 30, at_step=4)]
    found = proposals(runner, EagleHead, made, monkeypatch)
    assert len(found) > 12 and sum(len(ids) for _, ids in found) > 40
    expect_formula(runner, found, lambda known, num: proposed_by_formula(known, folder, HEADS[runner], num))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_random_head_changes_no_text(runners: list[CpuRunner], depth: int) -> None:
    """With preemption, swap space, prefix hits, forks, penalties and logprobs."""
    plain, speculating = runners
    made = []
    for i in range(12):
        prompt = (random_ids(40, 99) if i % 3 == 0 else []) + random_ids(5 + 4 * i, i)
        fields = (("repetition_penalty", 1.2),) if i % 4 == 1 else (("num_logprobs", 1),) if i % 4 == 2 else ()
        made.append(Request(tuple(prompt), 20 + i, GREEDY if i % 2 else i, 1 + i % 2, at_step=3 * i, fields=fields))
    made.append(Request(tuple(random_ids(180, 50)), 20, 3))
    pair, before = Pair(speculating, depth, adaptive_speculation=False), Pair(plain)
    assert pair.run(made) == before.run(made)
    if isinstance(plain.program, NativeProgram):
        assert pair.token_outputs == before.token_outputs
    counts = pair.scheduler.speculation.counts()
    assert counts.num_draft_tokens > max(300, counts.num_accepted_tokens)
    assert pair.scheduler.load().num_preemptions > 0


@pytest.mark.parametrize(
    ("changes", "lacking", "message"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, "", "hidden_size 64, and the model's is 48"),
        ({"vocab_size": 999}, "", "vocab_size 999"),
        ({}, "fc.weight", "lacks the tensor fc.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], lacking: str, message: str
) -> None:
    head = write_head(tmp_path / "head", **changes)
    if lacking:
        tensors = load_file(head / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lacking)}
        save_file(kept, head / "model.safetensors")
    speculative = SpeculativeSettings(method="eagle", draft=str(head))
    settings = Settings(model=str(folder), cache_dir=str(tmp_path), speculative=speculative)
    with pytest.raises(ModelError, match=message):
        prepare_head(settings, folder, SILENT)


def test_tensors_of_a_head_stay_unused_only_by_a_rule(folder: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    settings = Settings(
        model=str(folder),
        cache_dir=str(tmp_path),
        speculative=SpeculativeSettings(method="eagle", draft=str(head)),
    )
    said = io.StringIO()
    both = {name: torch.ones(4, 48) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file(tensors | both, head / "model.safetensors")
    prepare_head(settings, folder, Lines(said))
    for part in ("embed_tokens.weight': the head uses the model's own embedding", "lm_head.weight': the head uses the"):
        assert f"ignored '{part}" in said.getvalue()
    save_file(tensors | {"layers.0.self_attn.q_proj.bias": torch.ones(48)}, head / "model.safetensors")
    with pytest.raises(ModelError, match=r"'layers\.0\.self_attn\.q_proj\.bias' is not part of the model"):
        prepare_head(settings, folder, SILENT)
