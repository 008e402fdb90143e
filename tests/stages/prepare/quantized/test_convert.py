"""Quantized checkpoints become our formats with the values that their own libraries give them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import NOTES
from pipeline.stages.prepare.progress import for_stream
from pipeline.stages.prepare.quantized import convert
from pipeline.stages.prepare.quantized.methods import scheme_of
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.prepare.weights.tensors import find_tensors
from tests.stages.execute.checkpoints import reference_logits
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.prepare import checkpoints, forms
from tests.stages.prepare.checkpoints import formats_of, weights_of
from tests.stages.prepare.quantized import packers
from tests.stages.prepare.quantized.packers import Packed
from tests.stages.prepare.quantized.schemes import CASES, Case, compressed, gptq

KINDS = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
MAX_ERROR = 1e-4
"""Of a logit."""
DOWN, GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate", "up"))
Q = "model.layers.0.self_attn.q_proj.weight"


def tiny(**changes: Any) -> Any:
    return checkpoints.tiny("llama", **{"num_hidden_layers": 2, "intermediate_size": 96, **changes})


def prepared(source: Path, quantization: Any = "auto") -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache"), quantization=quantization))


def values_of(folder: Path) -> dict[str, Tensor]:
    """The values of the matrices of a prepared folder, by gguf's own dequantizer and torch's 8-bit floats."""
    formats = formats_of(folder)
    return {name: values_in(stored, formats[name]) for name, stored in weights_of(folder).items()}


def values_in(stored: Tensor, format: str) -> Tensor:
    if format in KINDS:
        return torch.from_numpy(gguf.dequantize(stored.numpy(), KINDS[format]))
    if format == "fp8":
        blocks = stored.view(len(stored), -1, 132)
        scales = blocks[:, :, :4].contiguous().view(torch.float32)
        return (blocks[:, :, 4:].view(torch.float8_e4m3fn).float() * scales).flatten(1)
    return stored.float()


def compare_logits(folder: Path, model: Any) -> None:
    """Our program in float32 gives the logits of transformers."""
    ids = np.random.default_rng(0).integers(3, 600, 40).tolist()
    driver = Driver(folder, settings())
    driver.step([(0, 0, 40, True)], adds=[row_add(0, ids, driver.take_blocks(40))])
    ours, theirs = driver.logits()[0], reference_logits(model, ids)[-1].numpy()
    assert theirs.std() > 1000 * MAX_ERROR
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=MAX_ERROR)


class Converted:
    def __init__(self, case: Case, root: Path) -> None:
        self.case, self.model = case, tiny(**case.shape)
        self.packed: dict[str, Packed] = packers.save(root / "tiny", self.model, case.config, case.pack)
        self.folder = prepared(root / "tiny")


@pytest.fixture(scope="module", params=CASES.values(), ids=[*CASES])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(request.param, tmp_path_factory.mktemp("checkpoint"))


def test_matrices_keep_their_values(converted: Converted) -> None:
    case, values = converted.case, values_of(converted.folder)
    assert len(converted.packed) == 14
    worst = 0.0
    for name, packed in converted.packed.items():
        error = (values[name] - packed.values).abs() / packed.values.abs().amax(1, keepdim=True)
        assert error.max() <= case.error, name
        worst = max(worst, float(error.max()))
    assert (worst > 0) == (case.error > 0), "the case is not what it says"


def test_matrices_have_the_promised_format(converted: Converted) -> None:
    formats = formats_of(converted.folder)
    assert {formats[name] for name in converted.packed} == {converted.case.format}
    floats = {name for name, format in formats.items() if format == "bf16"} - set(converted.packed)
    assert floats == {"model.embed_tokens.weight", "lm_head.weight"}


def test_what_is_not_packed_is_unchanged(converted: Converted) -> None:
    values = values_of(converted.folder)
    for name, tensor in converted.model.state_dict().items():
        if name not in converted.packed:
            assert torch.equal(values[name], tensor), name


def test_logits_are_those_of_transformers_with_the_values(converted: Converted) -> None:
    """If they are exact; else those of what was stored, which the tests above compare."""
    case, names = converted.case, converted.packed
    stored = values_of(converted.folder)
    values = {name: stored[name] if case.error else packed.values for name, packed in names.items()}
    compare_logits(converted.folder, packers.load_values(converted.model, values))


# ---------------------------------------------------------------------------------------------------------- act-order


def test_act_order_reorders_the_feed_forward_layer_and_dequantizes_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny(mlp_bias=True, attention_bias=True)
    pack = packers.gptq_act_order(4, 32)
    packed = packers.save(tmp_path / "tiny", model, gptq(4, 32, desc_act=True), pack)
    source = tmp_path / "tiny"
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache")), for_stream())
    formats, stored = formats_of(folder), values_of(folder)
    assert {name.split(".")[-2] for name in packed if formats[name] == "q4_0"} == {"down_proj"}
    order = torch.from_numpy(np.argsort(packed[DOWN].tensors["g_idx"].numpy(), kind="stable"))
    assert torch.equal(stored[DOWN], packed[DOWN].values[:, order])
    assert torch.equal(stored[GATE], packed[GATE].values[order].bfloat16().float())
    assert not torch.equal(stored[GATE], packed[GATE].values.bfloat16().float())
    exact = {name: each.values if formats[name] == "q4_0" else each.values.bfloat16() for name, each in packed.items()}
    compare_logits(folder, packers.load_values(model, exact))
    _, err = capfd.readouterr()
    line = next(line for line in err.splitlines() if "matrices:" in line)
    assert line.startswith("tiny: gptq, 4 bits, groups of 32, symmetric, act-order: matrices: ")
    assert "12 to bf16 (act-order: its groups of columns are not contiguous)" in line
    assert "2 to q4_0 (exact)" in line and "inputs of 2 down_proj are reordered" in line


def test_act_order_of_quantized_gate_and_up_reorders_their_blocks(tmp_path: Path) -> None:
    """Only down_proj is in act-order here, so that rows of blocks move."""
    mixed, plain = packers.gptq_act_order(4, 32), packers.gptq(4, 32)
    model = tiny()
    packed = packers.save(
        tmp_path / "tiny",
        model,
        gptq(4, 32, desc_act=True),
        lambda module, weight: (mixed if "down" in module else plain)(module, weight),
    )
    folder = prepared(tmp_path / "tiny")
    assert {formats_of(folder)[name] for name in packed} == {"q4_0"}
    compare_logits(folder, packers.load_values(model, {name: each.values for name, each in packed.items()}))


def test_columns_in_groups_of_different_sizes_become_bfloat16(tmp_path: Path) -> None:
    def pack(module: str, weight: Tensor) -> Packed:
        found = packers.gptq(4, 32)(module, weight)
        group_of = found.tensors["g_idx"].clone()
        group_of[0] = 1  # 31 columns in group 0, 33 in group 1
        scale = found.tensors["scales"].T.float()
        codes = (found.values / scale[:, torch.arange(weight.shape[1]) // 32]).round()
        found.tensors["g_idx"] = group_of
        return Packed(found.tensors, codes * scale[:, group_of.long()])

    packed = packers.save(tmp_path / "tiny", tiny(), gptq(4, 32, desc_act=True), pack)
    folder = prepared(tmp_path / "tiny")
    assert {formats_of(folder)[name] for name in packed} == {"bf16"}
    for name, each in packed.items():
        assert torch.equal(values_of(folder)[name], each.values.bfloat16().float()), name


# ------------------------------------------------------------------------------------------------ chosen quantization


@pytest.mark.parametrize("name", ["gptq", "gptq asym", "gptq 8", "awq", "int8", "mxfp4"])
def test_integers_are_kept_in_q8_0(tmp_path: Path, name: str) -> None:
    """Codes of 4 bits less their zero point fit 8 bits."""
    packed = packers.save(tmp_path / "tiny", tiny(), CASES[name].config, CASES[name].pack)
    folder = prepared(tmp_path / "tiny", "q8_0")
    formats, values = formats_of(folder), values_of(folder)
    assert {formats[matrix] for matrix in packed} == {"q8_0"} == {formats["lm_head.weight"]}
    for matrix, each in packed.items():
        assert torch.equal(values[matrix], each.values), matrix


def test_symmetric_integers_are_kept_in_q4_1(tmp_path: Path) -> None:
    packed = packers.save(tmp_path / "tiny", tiny(), CASES["gptq"].config, CASES["gptq"].pack)
    folder = prepared(tmp_path / "tiny", "q4_1")
    values = values_of(folder)
    assert {formats_of(folder)[name] for name in packed} == {"q4_1"}
    for name, each in packed.items():
        assert torch.equal(values[name], each.values), name


@pytest.mark.parametrize(("name", "quantization"), [("nf4", "q8_0"), ("gptq 8", "q4_1"), ("fp8", "q4_1")])
def test_other_values_are_quantized_again(tmp_path: Path, name: str, quantization: str) -> None:
    packed = packers.save(tmp_path / "tiny", tiny(), CASES[name].config, CASES[name].pack)
    folder = prepared(tmp_path / "tiny", quantization)
    stored = weights_of(folder)
    for matrix, each in packed.items():
        expected = gguf.quantize(each.values.numpy(), KINDS[quantization])
        assert torch.equal(stored[matrix], torch.from_numpy(expected)), matrix


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_floats_are_dequantized(tmp_path: Path, quantization: str) -> None:
    """A GPU computes int8 and int4 from them."""
    packed = packers.save(tmp_path / "tiny", tiny(), CASES["gptq"].config, CASES["gptq"].pack)
    folder = prepared(tmp_path / "tiny", quantization)
    assert folder == prepared(tmp_path / "tiny", "none") != prepared(tmp_path / "tiny", "auto")
    for name, each in packed.items():
        assert torch.equal(values_of(folder)[name], each.values.bfloat16().float()), name


# -------------------------------------------------------------------------------------------------------- edge cases


def test_pieces_of_any_size_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by rows, not by matrices."""
    for name in ("gptq asym", "awq", "packed asym", "nf4, quantized scales", "fp8, blocks", "mxfp4"):
        source = tmp_path / name / "tiny"
        packers.save(source, tiny(), CASES[name].config, CASES[name].pack)
        whole = weights_of(prepared(source))
        with monkeypatch.context() as patch:
            patch.setattr(convert, "CHUNK_VALUES", 7 * 64)
            patch.setattr("pipeline.stages.prepare.stage.FORMAT", 10_000)
            in_pieces = weights_of(prepared(source))
        assert whole.keys() == in_pieces.keys()
        for tensor, value in whole.items():
            assert torch.equal(value, in_pieces[tensor]), (name, tensor)


def test_files_are_opened_once(tmp_path: Path) -> None:
    """A large model has more matrices than a process may have open files."""
    case = CASES["awq"]
    packers.save(tmp_path / "tiny", tiny(), case.config, case.pack)
    scheme = scheme_of({"quantization_config": case.config}, tmp_path / "config.json")
    assert scheme is not None
    model = ModelConfig.load(prepared(tmp_path / "tiny"))
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    checkpoint = convert.Checkpoint(model, scheme, find_tensors([tmp_path / "tiny" / "model.safetensors"])[0])
    assert len(list(open_files.iterdir())) <= before + 1
    assert checkpoint.targets("auto")[DOWN].format == "q4_1"


def test_8_bit_floats_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    def pack(module: str, weight: Tensor) -> Packed:
        found = case.pack(module, weight)
        assert found is not None
        found.tensors["weight"].view(torch.uint8)[5, 9] = 0xFF
        return found

    case = CASES["fp8, kept"]
    packers.save(tmp_path / "tiny", tiny(**case.shape), case.config, pack)
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\..*\.weight' has values that are not numbers"):
        prepared(tmp_path / "tiny")


def test_scales_too_small_for_float16_make_bfloat16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny()
    with torch.no_grad():
        model.state_dict()[Q].mul_(1e-5)
    packed = packers.save(
        tmp_path / "tiny", model, compressed("pack-quantized", num_bits=4, group_size=32), packers.pack_quantized(4, 32)
    )
    folder = prepare(Settings(model=str(tmp_path / "tiny"), cache_dir=str(tmp_path / "cache")), for_stream())
    formats = formats_of(folder)
    assert {name for name in packed if formats[name] == "bf16"} == {Q}
    assert torch.equal(values_of(folder)[Q], packed[Q].values.bfloat16().float())
    assert "1 to bf16 (scales outside float16's range)" in capfd.readouterr().err


def test_a_symmetric_file_of_either_convention_is_read_alike(tmp_path: Path) -> None:
    """Some files have zero points as version 2 stores them, but do not say so."""
    folders = []
    for v1 in (True, False):
        packers.save(tmp_path / str(v1) / "tiny", tiny(), gptq(4, 32), packers.gptq(4, 32, v1=v1))
        folders.append(values_of(prepared(tmp_path / str(v1) / "tiny")))
    assert all(torch.equal(value, folders[1][name]) for name, value in folders[0].items())


def test_zero_biases_and_activation_scales_are_ignored(tmp_path: Path) -> None:
    """AutoGPTQ gives every layer a bias."""
    extra = {
        DOWN.replace("weight", "bias"): torch.zeros(64),
        Q.replace("weight", "input_scale"): torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    packers.save(tmp_path / "tiny", tiny(), CASES["gptq"].config, CASES["gptq"].pack, **extra)
    folder = prepared(tmp_path / "tiny")
    assert "q_proj.bias" not in formats_of(folder)
    notes = (folder / NOTES).read_text()
    for reason in ("biases of zeros change nothing", "have scales of their own", "rotary frequencies are computed"):
        assert notes.count(reason) == 1


def test_a_quantized_head_is_served(tmp_path: Path) -> None:
    case = CASES["gptq"]
    head = packers.gptq(4, 32)("lm_head", tiny().state_dict()["lm_head.weight"].bfloat16().float())
    model = tiny()
    extra = {f"lm_head.{part}": value.contiguous() for part, value in head.tensors.items()}
    packed = packers.save(tmp_path / "tiny", model, {**case.config, "lm_head": True}, case.pack, **extra)
    _without(tmp_path / "tiny" / "model.safetensors", "lm_head.weight")
    folder = prepared(tmp_path / "tiny")
    assert formats_of(folder)["lm_head.weight"] == "q4_0"
    values = {name: each.values for name, each in {**packed, "lm_head.weight": head}.items()}
    compare_logits(folder, packers.load_values(model, values))


@pytest.mark.parametrize("is_quantized", [False, True], ids=["float", "quantized"])
def test_a_tied_model_with_a_head_of_its_own_keeps_it(tmp_path: Path, is_quantized: bool) -> None:
    """As GPTQ checkpoints of Qwen2.5 and Llama 3.2 have it: `tie_word_embeddings` stays true."""
    case, model = CASES["gptq"], tiny()
    values = model.state_dict()["lm_head.weight"].bfloat16().float()
    extra, head = {}, Packed({}, values)
    if is_quantized:
        head = packers.gptq(4, 32)("lm_head", values)
        extra = {f"lm_head.{part}": value.contiguous() for part, value in head.tensors.items()}
    packed = packers.save(tmp_path / "tiny", model, case.config, case.pack, **extra)
    if is_quantized:
        _without(tmp_path / "tiny" / "model.safetensors", "lm_head.weight")
    checkpoints.edit_config(tmp_path / "tiny", tie_word_embeddings=True)
    folder = prepared(tmp_path / "tiny")
    assert "the LM head is lm_head." in (folder / NOTES).read_text()
    compare_logits(
        folder, packers.load_values(model, {n: each.values for n, each in {**packed, "lm_head.weight": head}.items()})
    )


def test_the_text_part_of_a_model_may_be_quantized_and_have_the_config_of_it(tmp_path: Path) -> None:
    """Some exporters write quantization_config into text_config, where vLLM looks too."""
    case, model = CASES["gptq"], forms.MODELS["mistral3"]().eval()
    packed = packers.save(tmp_path / "tiny", model, case.config, case.pack)
    path = tmp_path / "tiny" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    folder = prepared(tmp_path / "tiny")
    assert "images are not served" in (folder / NOTES).read_text()
    compare_logits(folder, packers.load_values(model, {name: each.values for name, each in packed.items()}))


def test_a_tied_model_without_a_head_is_tied(tmp_path: Path) -> None:
    case, model = CASES["gptq"], tiny(tie_word_embeddings=True)
    packed = packers.save(tmp_path / "tiny", model, case.config, case.pack)
    _without(tmp_path / "tiny" / "model.safetensors", "lm_head.weight")
    folder = prepared(tmp_path / "tiny")
    assert ModelConfig.load(folder).tie_embeddings and not (folder / NOTES).exists()
    compare_logits(folder, packers.load_values(model, {name: each.values for name, each in packed.items()}))


def test_some_matrices_may_be_floats(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = CASES["awq"]
    packers.save(
        tmp_path / "tiny",
        tiny(),
        {**case.config, "modules_to_not_convert": ["down_proj"]},
        lambda module, weight: None if "down_proj" in module else case.pack(module, weight),
    )
    folder = prepare(Settings(model=str(tmp_path / "tiny"), cache_dir=str(tmp_path / "cache")), for_stream())
    assert formats_of(folder)[DOWN] == "bf16" and formats_of(folder)[GATE] == "q4_1"
    assert "4 were floats" in capfd.readouterr().err


def test_ignored_parts_of_the_config_are_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = compressed("int-quantized", num_bits=8, strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    config["kv_cache_scheme"] = {"num_bits": 8}
    packers.save(tmp_path / "tiny", tiny(), config, packers.int_quantized())
    prepare(Settings(model=str(tmp_path / "tiny"), cache_dir=str(tmp_path / "cache")), for_stream())
    line = next(line for line in capfd.readouterr().err.splitlines() if "matrices:" in line)
    assert line == (
        "tiny: compressed-tensors, int-quantized, int8 per channel: matrices: 14 to q8_0 (exact), 2 were floats; "
        "activations are not quantized; the KV cache is not quantized"
    )


def _without(path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    save_file({key: value for key, value in load_file(path).items() if key != name}, path, {"format": "pt"})
