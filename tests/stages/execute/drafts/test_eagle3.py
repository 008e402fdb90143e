"""An EAGLE-3 head proposes what its formula says, and changes no text. The heads are random: none can be had here."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings, SpeculativeSettings
from pipeline.kernels.step_inputs import block_bytes
from pipeline.stages.execute.cpu.drafts.eagle3 import Eagle3Head
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.prepare.drafts import draft
from pipeline.stages.prepare.drafts.eagle import prepare_head
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import SILENT
from tests.compiled import link_kernels
from tests.stages.execute import checkpoints
from tests.stages.execute.drafts.proposals import expect_formula, proposals
from tests.stages.execute.drafts.test_eagle import CONFIG
from tests.stages.execute.drafts.test_eagle import HEAD as EAGLE_HEAD
from tests.stages.execute.native_driver import random_ids, write
from tests.stages.execute.pair import GREEDY, NUM_THREADS, Pair, Request, make_runner

HEADS, DIM, INNER, EPS = 3, 16, 64, 1e-5
LAYERS = [0, 1, 2]
NUM_IDS = 150
HEAD: dict[str, Any] = EAGLE_HEAD | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": NUM_IDS,
    "eagle_aux_hidden_state_layer_ids": LAYERS,
}
FULL = {"draft_vocab_size": CONFIG.vocab_size, "norm_before_residual": True}
"""A head with all ids, with its own embedding, and with the other kind of residual."""


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors of a head, by the names that SGLang and vLLM read."""
    hidden, num_ids, generator = config["hidden_size"], config["draft_vocab_size"], torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.k_proj": (DIM, 2 * hidden),
        "midlayer.self_attn.v_proj": (DIM, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, HEADS * DIM),
        "midlayer.mlp.gate_proj": (INNER, hidden),
        "midlayer.mlp.up_proj": (INNER, hidden),
        "midlayer.mlp.down_proj": (hidden, INNER),
        "lm_head": (num_ids, hidden),
    }
    is_full = num_ids == CONFIG.vocab_size
    if is_full:
        shapes["embed_tokens"] = (num_ids, hidden)
    tensors = {f"{name}.weight": 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    for name in norms:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    if not is_full:
        target_ids = torch.randperm(CONFIG.vocab_size, generator=generator)[:num_ids].sort().values
        tensors["d2t"] = target_ids - torch.arange(num_ids)
        tensors["t2d"] = torch.isin(torch.arange(CONFIG.vocab_size), target_ids)
    return tensors


def write_head(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    config = HEAD | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config), folder / "model.safetensors")
    return folder


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def layer(x: Tensor, residual: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The head's layer in plain torch: attention reads `x` [positions, 2 H]."""
    num = len(x)
    q, k, v = (
        functional.linear(x, weights[f"midlayer.self_attn.{name}_proj.weight"]).view(num, -1, DIM) for name in "qkv"
    )
    angles = torch.arange(num)[:, None] * (10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    cos, sin = torch.cat((angles, angles), -1).cos()[:, None], torch.cat((angles, angles), -1).sin()[:, None]

    def turned(heads: Tensor) -> Tensor:
        low, high = heads.chunk(2, -1)
        return heads * cos + torch.cat((-high, low), -1) * sin

    q, k, v = turned(q).transpose(0, 1), turned(k).transpose(0, 1), v.transpose(0, 1)
    attended = functional.scaled_dot_product_attention(
        q, k.expand(HEADS, -1, -1), v.expand(HEADS, -1, -1), is_causal=True
    )
    flat = attended.transpose(0, 1).reshape(num, HEADS * DIM)
    residual = residual + functional.linear(flat, weights["midlayer.self_attn.o_proj.weight"])
    inner = normed(residual, weights["midlayer.post_attention_layernorm.weight"])
    gate, up = (functional.linear(inner, weights[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return residual + functional.linear(functional.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])


def proposed_by_formula(ids: list[int], folder: Path, head: Path, num: int) -> list[int]:
    """The likeliest ids that a head proposes after these, in float32."""
    model = checkpoints.reference_model(CONFIG)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    stored = load_file(head / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in stored.items() if name not in ("d2t", "t2d")}
    is_normed = json.loads((head / "config.json").read_text()).get("norm_before_residual", False)
    table = weights.get("embed_tokens.weight", model.model.embed_tokens.weight)
    found: list[int] = []
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        hidden = functional.linear(torch.cat([states[i][0, :-1] for i in LAYERS], -1), weights["fc.weight"])
        for _ in range(num):
            embedded = normed(table[torch.tensor([*ids[1:], *found])], weights["midlayer.input_layernorm.weight"])
            own = normed(hidden, weights["midlayer.hidden_norm.weight"])
            last = layer(torch.cat((embedded, own), -1), own if is_normed else hidden, weights)[-1:]
            logits = functional.linear(normed(last, weights["norm.weight"]), weights["lm_head.weight"])
            drawn = int(logits.argmax())
            found.append(drawn + (int(stored["d2t"][drawn]) if "d2t" in stored else 0))
            hidden = torch.cat((hidden, last))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write(folder, CONFIG)
    return folder


@pytest.fixture(scope="module", params=["auto", "torch"])
def made(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CpuRunner, CpuRunner, Path]]:
    """A runner without speculation, one with a head and little memory, and the head: with a reduced vocabulary by the
    library, with all ids by torch."""
    is_torch = request.param == "torch"
    how: dict[str, Any] = {"kernels": request.param, "dtype": "float32" if is_torch else "bfloat16"}
    size = 4 if is_torch else 2
    num_bytes = block_bytes(3, 2, 16, size)
    root = tmp_path_factory.mktemp("cache")
    link_kernels(root)
    head = write_head(root / "head", **(FULL if is_torch else {}))
    settings = Settings(
        model=str(folder),
        cache_dir=str(root),
        execute=ExecuteSettings(
            kv_cache_bytes=20 * (num_bytes + block_bytes(1, 1, 16, size)), num_threads=NUM_THREADS, **how
        ),
        schedule=ScheduleSettings(max_num_seqs=16, max_num_batched_tokens=256),
        speculative=SpeculativeSettings(method="eagle", draft=str(head), num_speculative_tokens=4),
    )
    draft.link(settings, prepare_head(settings, folder, SILENT), SILENT)
    speculating = CpuRunner(settings, folder, memoryview(bytearray(8 * num_bytes)))
    assert speculating.facts.num_blocks == 20  # of both caches
    plain = make_runner(folder, num_bytes, 160, **how)
    yield plain, speculating, head
    plain.close()
    speculating.close()


def test_a_head_proposes_what_its_formula_says(
    made: tuple[CpuRunner, CpuRunner, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ids are sampled than proposed."""
    _, runner, head = made
    requests = [Request(tuple(random_ids(70, 1)), 8), Request(tuple(random_ids(5, 2)), 20, at_step=4)]
    found = proposals(runner, Eagle3Head, requests, monkeypatch)
    assert len(found) > 8 and sum(len(ids) for _, ids in found) > 30
    expect_formula(runner, found, lambda known, num: proposed_by_formula(known, folder, head, num))


def test_a_random_head_changes_no_text(made: tuple[CpuRunner, CpuRunner, Path]) -> None:
    """With preemption, swap space, prefix hits, forks, penalties, bias and logprobs, at any temperature."""
    plain, speculating, _ = made
    kinds = (
        (),
        (("repetition_penalty", 1.2),),
        (("num_logprobs", 1),),
        (("bias_ids", [3]), ("bias_values", [2.0])),
    )
    requests = []
    for i in range(8):
        prompt = (random_ids(40, 99) if i % 3 == 0 else []) + random_ids(5 + 4 * i, i)
        seed = GREEDY if i % 2 else i
        requests.append(Request(tuple(prompt), 20 + i, seed, 1 + i % 2, at_step=3 * i, fields=kinds[i % 4]))
    # Together they outgrow the blocks that they started with.
    requests += [Request(tuple(random_ids(33, 50 + i)), 70, i, at_step=60) for i in range(4)]
    pair, before = Pair(speculating, 2, adaptive_speculation=False), Pair(plain)
    assert pair.run(requests) == before.run(requests)
    if isinstance(plain.program, NativeProgram):
        assert pair.token_outputs == before.token_outputs
    counts = pair.scheduler.speculation.counts()
    assert counts.num_draft_tokens > max(300, counts.num_accepted_tokens)
    assert pair.scheduler.load().num_preemptions > 0


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("changes", "change", "message"),
    [
        ({}, without("d2t"), "lacks the tensor d2t"),
        ({}, without("norm.weight"), r"lacks the tensor norm\.weight"),
        ({}, lambda found: found | {"d2t": found["d2t"] + 1000}, "d2t .* names ids from .* to .*, of"),
        ({}, lambda found: found | {"d2t": found["d2t"].int()}, "d2t .* is I32, not I64"),
        ({}, lambda found: found | {"fc.weight": found["fc.weight"][:, 1:].contiguous()}, r"fc\.weight .* not \[48"),
        ({}, lambda found: found | {"midlayer.gate": found["d2t"].clone()}, "'midlayer.gate' is not part of the model"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, without(), "three of them, in rising order"),
        ({"eagle_aux_hidden_state_layer_ids": None}, without(), "the default of eagle_aux_hidden_state_layer_ids"),
        ({"num_hidden_layers": 2}, without(), "EAGLE-3 heads have 1"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
) -> None:
    head = write_head(tmp_path / "head", **changes)
    save_file(change(load_file(head / "model.safetensors")), head / "model.safetensors")
    speculative = SpeculativeSettings(method="eagle", draft=str(head))
    settings = Settings(model=str(folder), cache_dir=str(tmp_path), speculative=speculative)
    with pytest.raises(ModelError, match=message):
        prepare_head(settings, folder, SILENT)
