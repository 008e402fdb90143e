"""PEFT's adapters become files for the executor, and what can't be served is refused by name."""

import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.config.settings import LoraSettings, Settings
from pipeline.lora.adapter_file import AdapterFile, path_of
from pipeline.lora.convert import convert
from pipeline.lora.peft_config import MAX_VALUES, AdapterError, NotAnAdapter
from pipeline.lora.tensors import bf16_to_float
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.model_folder import STAMP, hold
from pipeline.stages.prepare.adapters import prepare, remove_unused
from pipeline.stages.prepare.progress import for_stream
from tests.lora.random_adapters import ALL, module_of, peft_config, write_adapter
from tests.stages.execute.checkpoints import config_of

CONFIG = config_of()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    CONFIG.save(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter_model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_file_has_the_matrices_with_the_scaling_in_b(tmp_path: Path, model_dir: Path, dtype: Any) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG, rank=4, lora_alpha=6)
    file = AdapterFile(path_of(model_dir, convert(folder, model_dir, dtype, 16)))
    assert file.header.max_rank == 4 and len(file.header.entries) == CONFIG.num_layers * len(ALL)
    tensors = tensors_of(folder)
    for layer in range(CONFIG.num_layers):
        for target in ALL:
            found = file.matrices(layer, target)  # type: ignore[arg-type]
            assert found is not None
            a, b = found if dtype == "f32" else map(bf16_to_float, found)
            name = f"base_model.model.{module_of(layer, target)}"
            tolerance = 0 if dtype == "f32" else 2**-8
            np.testing.assert_allclose(a, tensors[f"{name}.lora_A.weight"], rtol=tolerance)
            np.testing.assert_allclose(b, tensors[f"{name}.lora_B.weight"] * np.float32(1.5), rtol=tolerance)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_start_says_which_adapters_it_reads(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """In a line: a bar would know no size, and say 0."""
    folder = write_adapter(tmp_path / "peft", CONFIG, rank=4)
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: is_terminal)
    settings = Settings(lora=LoraSettings(adapters={"sql": str(folder)}))
    assert [one.name for one in prepare(settings, model_dir, "model", for_stream(said))] == ["sql"]
    assert said.getvalue() == f"reading adapter sql from {folder}\n"


def test_the_id_is_that_of_the_content(tmp_path: Path, model_dir: Path) -> None:
    one = convert(write_adapter(tmp_path / "a", CONFIG), model_dir, "f32", 16)
    assert convert(write_adapter(tmp_path / "b", CONFIG), model_dir, "f32", 16) == one
    others = [
        convert(write_adapter(tmp_path / "c", CONFIG, seed=1), model_dir, "f32", 16),
        convert(write_adapter(tmp_path / "d", CONFIG, lora_alpha=1), model_dir, "f32", 16),
        convert(tmp_path / "a", model_dir, "bf16", 16),
    ]
    assert len({one, *others}) == 4


def test_files_that_were_not_loaded_for_long_are_removed(tmp_path: Path, model_dir: Path) -> None:
    old, new = (convert(write_adapter(tmp_path / f"{i}", CONFIG, seed=i), model_dir, "f32", 16) for i in range(2))
    for adapter_id in (old, new):
        os.utime(path_of(model_dir, adapter_id), (0, 0))
    convert(tmp_path / "1", model_dir, "f32", 16)  # loads it again
    (model_dir / STAMP).write_text("{}")
    held = hold(model_dir)
    assert held is not None
    with held:
        remove_unused(model_dir)
    assert path_of(model_dir, old).exists(), "a running server may need it"
    remove_unused(model_dir)
    assert not path_of(model_dir, old).exists() and path_of(model_dir, new).exists()


def test_scalings_of_peft() -> None:
    assert peft_config(lora_alpha=16).scaling("x.q_proj", 8) == 2
    assert peft_config(lora_alpha=16, use_rslora=True).scaling("x.q_proj", 4) == 8
    patterns = peft_config(
        rank_pattern={"q_proj": 2, "^model.layers.1.mlp.up_proj": 3}, alpha_pattern={"0.q_proj": 5.0}
    )
    assert [patterns.rank(name) for name in ("layers.0.q_proj", "layers.0.xq_proj", "q_proj")] == [2, 8, 2]
    assert patterns.rank("model.layers.1.mlp.up_proj") == 3 and patterns.rank("x.model.layers.1.mlp.up_proj") == 8
    assert patterns.scaling("layers.0.q_proj", 2) == 2.5 and patterns.scaling("layers.1.q_proj", 2) == 4


def test_a_stacked_module_becomes_its_projections(tmp_path: Path) -> None:
    """As in Phi-3, whose queries, keys and values are one matrix."""
    queries, keys = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    name = "self_attn.qkv_proj"
    pieces = {
        "self_attn.q_proj": Piece(name, end=queries),
        "self_attn.k_proj": Piece(name, begin=queries, end=queries + keys),
        "self_attn.v_proj": Piece(name, begin=queries + keys),
    }
    ModelConfig(
        **{
            **{field: getattr(CONFIG, field) for field in CONFIG.__struct_fields__},
            "layout": Layout(pieces=pieces),
        }
    ).save(tmp_path)
    folder = write_adapter(tmp_path / "peft", CONFIG, targets=())
    random = np.random.default_rng(3)
    a = random.normal(size=(4, CONFIG.hidden_size)).astype(np.float32)
    b = random.normal(size=(queries + 2 * keys, 4)).astype(np.float32)
    module = f"base_model.model.model.layers.1.{name}"
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    change_config(folder, lora_alpha=4)
    file = AdapterFile(path_of(tmp_path, convert(folder, tmp_path, "f32", 16)))
    found = [file.matrices(1, target) for target in ("q_proj", "k_proj", "v_proj")]
    assert all(pair is not None and (pair[0] == a).all() for pair in found)
    assert (np.concatenate([pair[1] for pair in found if pair is not None]) == b).all()
    assert file.matrices(0, "q_proj") is None and file.matrices(1, "o_proj") is None


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"r": 0}, "r is 0"),
    ({"r": "8"}, r"Expected `int`, got `str` - at `\$.r`"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"use_dora": True}, "use_dora is true"),
    ({"lora_bias": True}, "lora_bias is true"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices is set"),
    ({"target_parameters": ["x"]}, "target_parameters is set"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    ({"init_lora_weights": "PiSSA"}, "convert the adapter with PEFT"),
    ({"init_lora_weights": "olora"}, "convert the adapter with PEFT"),
    ({"init_lora_weights": "corda"}, "convert the adapter with PEFT"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga', which changes the model's own weights"),
    ({"init_lora_weights": "loftq"}, "merge the adapter into them"),
    ({"init_lora_weights": "of_a_later_peft"}, "init_lora_weights is 'of_a_later_peft', which is not known here"),
    ({"kasa_config": {"beta": 1e-4}}, "kasa_config is set"),
    ({"arrow_config": {"top_k": 3}}, "arrow_config is set"),
    ({"monteclora_config": {"num_samples": 8}}, "monteclora_config is set"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
    ({"rank_pattern": {"(q|k)_proj": 4}}, "rank_pattern has the key"),
    ({"alpha_pattern": {"q_proj": -1.0}}, "alpha_pattern has -1.0"),
    ({"rank_pattern": {"q_proj": 10**400}}, f"rank_pattern has 1{'0' * 39} for 'q_proj'$"),
    ({"r": 10**400}, f"r is 1{'0' * 39}; it must be from 1 to 1024"),
    ({"r": 5}, "r or rank_pattern in adapter_config.json give it rank 5"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED_CONFIGS)
def test_configs_that_are_refused(tmp_path: Path, model_dir: Path, fields: dict[str, Any], words: str) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG)
    change_config(folder, **fields)
    with pytest.raises(AdapterError, match=words) as caught:
        convert(folder, model_dir, "f32", 16)
    assert str(folder) in str(caught.value)
    assert not (model_dir / "adapters").exists()


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initializations_that_leave_the_model_as_it_is_are_accepted(tmp_path: Path, model_dir: Path, init: Any) -> None:
    """PEFT also writes true when it has converted an adapter of a changed model."""
    folder = write_adapter(tmp_path / "peft", CONFIG)
    change_config(folder, init_lora_weights=init)
    convert(folder, model_dir, "f32", 16)


def with_tensor(name: str, array: Any) -> Any:
    return lambda tensors: tensors.update({name: array})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
ONES = np.ones((4, CONFIG.hidden_size), np.float32)
REFUSED_TENSORS: list[tuple[Any, str]] = [
    (with_tensor("base_model.model.lm_head.lora_A.weight", ONES), "changes 'lm_head'; supported are the projections"),
    (with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", ONES), "is an adapter of an embedding"),
    (with_tensor(f"{FIRST}.lora_magnitude_vector", ONES), "the magnitude of DoRA"),
    (with_tensor("base_model.model.lm_head.modules_to_save.weight", ONES), "modules_to_save"),
    (with_tensor(f"{FIRST}.bias", ONES), "is a bias"),
    (with_tensor("x", ONES), "'x' is a tensor that is not part of a LoRA adapter"),
    (with_tensor("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", ONES), "layers.9.self_attn.q_proj"),
    (with_tensor(f"{FIRST}.lora_A.weight", ONES[:, :-2]), "q_proj of this model has 48 inputs and 96 outputs"),
    (with_tensor(f"{FIRST}.lora_A.weight", ONES[:3]), "give it rank 4"),
    (with_tensor(f"{FIRST}.lora_A.weight", ONES * np.nan), "not finite"),
    (with_tensor(f"{FIRST}.lora_A.weight", ONES.astype(np.int32)), "dtype I32"),
    (with_tensor(f"{FIRST}.lora_A.weight", ONES[0]), "not that of a matrix"),
    (lambda tensors: tensors.pop(f"{FIRST}.lora_B.weight"), "has no lora_B.weight"),
    (lambda tensors: tensors.clear(), "no tensors of a LoRA adapter"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED_TENSORS)
def test_tensors_that_are_refused(tmp_path: Path, model_dir: Path, change: Any, words: str) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG)
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=words) as caught:
        convert(folder, model_dir, "f32", 16)
    assert "adapter_model.safetensors" in str(caught.value)


LARGE = np.full((CONFIG.num_heads * CONFIG.head_dim, 4), 3e38, np.float32)


@pytest.mark.parametrize(
    ("name", "array", "dtype", "alpha", "is_refused"),
    [
        ("lora_B", LARGE, "f32", 8, True),
        ("lora_B", LARGE, "bf16", 8, True),
        ("lora_B", -LARGE, "bf16", 8, True),
        ("lora_B", LARGE, "f32", 4, False),
        ("lora_B", LARGE, "bf16", 4, False),
        ("lora_B", LARGE, "f32", 1e40, True),
        ("lora_B", LARGE * 0, "f32", 1e40, True),
        ("lora_A", np.full_like(ONES, 3.4e38), "bf16", 4, True),
        ("lora_A", np.full_like(ONES, 3.4e38), "f32", 4, False),
    ],
)
def test_matrices_must_be_finite_as_they_are_stored(
    tmp_path: Path, model_dir: Path, name: str, array: Any, dtype: Any, alpha: float, is_refused: bool
) -> None:
    """After the scaling by alpha / r, and rounded."""
    folder = write_adapter(tmp_path / "peft", CONFIG)
    change_config(folder, lora_alpha=alpha)
    tensors = tensors_of(folder)
    tensors[f"{FIRST}.{name}.weight"] = array
    save_file(tensors, folder / "adapter_model.safetensors")
    if is_refused:
        with pytest.raises(AdapterError, match=rf"{name} of 'model[^']+' .* not finite as {dtype}"):
            convert(folder, model_dir, dtype, 16)
    else:
        convert(folder, model_dir, dtype, 16)


@pytest.mark.parametrize("data", [b"", b"\x10", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}", b'\x05\0\0\0\0\0\0\0{"a":'])
def test_damaged_files_are_refused(tmp_path: Path, model_dir: Path, data: bytes) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        convert(folder, model_dir, "f32", 16)


def test_errors_are_a_short_line_whatever_the_file_says(tmp_path: Path, model_dir: Path) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG)
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    for field, value in (("shape", [0] * 500_000), ("dtype", "\u202e\n")):
        header = json.loads(data[8:length])
        first = next(name for name in header if name != "__metadata__")
        header[first][field] = value
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[length:])
        with pytest.raises(AdapterError) as caught:
            convert(folder, model_dir, "f32", 16)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 5000


def test_a_truncated_file_is_refused(tmp_path: Path, model_dir: Path) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(AdapterError, match="are not in the file"):
        convert(folder, model_dir, "f32", 16)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json: No such file"):
        convert(tmp_path, model_dir, "f32", 16)
    folder = write_adapter(tmp_path / "peft", CONFIG)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="weights must be in this safetensors file"):
        convert(folder, model_dir, "f32", 16)


def test_json_with_many_values_is_refused_before_it_is_decoded(tmp_path: Path, model_dir: Path) -> None:
    """The decoder of a gateway holds Python's lock: 0.1 s and more for each megabyte of small values."""
    folder = write_adapter(tmp_path / "peft", CONFIG)
    config = (folder / "adapter_config.json").read_text("utf-8")
    for name in ("rank_pattern", "unknown"):
        change_config(folder, **{name: {str(number): 1 for number in range(MAX_VALUES)}})
        with pytest.raises(NotAnAdapter, match=f"more than {MAX_VALUES} values"):
            convert(folder, model_dir, "f32", 16)
        (folder / "adapter_config.json").write_text(config, "utf-8")
    header = json.dumps({str(number): 0 for number in range(MAX_VALUES + 1)}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(NotAnAdapter, match=f"more than {MAX_VALUES} values"):
        convert(folder, model_dir, "f32", 16)
    header = b"[" * (MAX_VALUES + 1)
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(NotAnAdapter, match=f"more than {MAX_VALUES} values"):
        convert(folder, model_dir, "f32", 16)


def test_the_rank_is_limited(tmp_path: Path, model_dir: Path) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG, rank=9)
    for _ in range(2):
        with pytest.raises(AdapterError, match=r"the rank is 9, but lora\.max_lora_rank is 8"):
            convert(folder, model_dir, "f32", 8)
        convert(folder, model_dir, "f32", 9)  # the second time, its file is there


def test_files_that_are_no_prepared_adapters_are_refused(tmp_path: Path, model_dir: Path) -> None:
    path = path_of(model_dir, convert(write_adapter(tmp_path / "peft", CONFIG), model_dir, "f32", 16))
    data = path.read_bytes()
    for damaged in (data[:20], b"x" + data[1:], data[:-64]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is too short|is no prepared adapter"):
            AdapterFile(path)
    convert(tmp_path / "peft", model_dir, "f32", 16)
    assert path.read_bytes() == data, "it is made again"


def test_a_conversion_takes_the_size_of_the_file_and_one_projection(tmp_path: Path) -> None:
    config = config_of(hidden_size=1024, intermediate_size=2048, num_layers=6)
    (model_dir := tmp_path / "large").mkdir()
    config.save(model_dir)
    folder = write_adapter(tmp_path / "peft", config, rank=32, dtype=np.float16)
    size = (folder / "adapter_model.safetensors").stat().st_size
    largest = 4 * 32 * (1024 + 2048)
    tracemalloc.start()
    try:
        convert(folder, model_dir, "bf16", 32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 20 * largest / 4, "or the test would say nothing"
    # The file's own bytes are in memory of their own, which is not traced.
    assert peak < 6 * largest, (peak, size, largest)
