"""Every encoder has the results of transformers, and a text the same bits alone and beside others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.runtime.messages import Pooling
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.models import decoder
from pipeline.stages.execute.weights import Weights
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.tiny_encoders import MODERN, VARIANTS, Texts, Variant, random_ids, write
from tests.stages.execute.pair import NUM_THREADS

MAX_ERROR = 1e-4
MIN_COSINE = 0.9999
LENGTHS = (40, 1, 17, 128)


def texts(variant: Variant) -> tuple[list[list[int]], list[int]]:
    """Texts, the last of which is as long as any may be, and where their tokens of type 1 begin."""
    longest = 126 if variant.changes.get("pad_token_id") == 1 else 128
    found = [random_ids(min(num, longest), num) for num in LENGTHS]
    num_types = variant.changes.get("type_vocab_size", {"bert": 2, "nomic_bert": 2}.get(variant.kind, 1))
    has_types = num_types == 2
    return found, [19, 0, 0, 0] if has_types else [0] * 4


def reference(variant: Variant, model: Any, ids: list[int], segment_start: int = 0) -> np.ndarray:
    """The logits of transformers, or the mean of the hidden states."""
    types = {}
    if segment_start:
        types["token_type_ids"] = torch.tensor([[int(i >= segment_start) for i in range(len(ids))]])
    with torch.inference_mode():
        out = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **types)
    found: np.ndarray = out.logits[0].numpy() if variant.head else out.last_hidden_state[0].mean(0).numpy()
    return found


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    a, b = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("name", VARIANTS)
def test_results_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    folder, model = write(tmp_path, variant)
    computed = Texts(folder, settings(kernels="torch", kv_mib=2, tokens=256))
    assert isinstance(computed.runner.program, TorchProgram)
    inputs, starts = texts(variant)
    found = computed.compute(inputs, segment_starts=starts)
    for ids, start, ours in zip(inputs, starts, found, strict=True):
        theirs = reference(variant, model, ids, start)
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_native_program_is_near_them_in_bfloat16_and_has_the_same_bits_in_any_batch(
    tmp_path: Path, name: str
) -> None:
    variant = VARIANTS[name]
    folder, model = write(tmp_path, variant)
    computed = Texts(folder, settings(dtype="bfloat16", kv_mib=2, threads=2, tokens=256))
    assert isinstance(computed.runner.program, NativeProgram)
    inputs, starts = texts(variant)
    together = computed.compute(inputs, segment_starts=starts)
    with torch.no_grad():
        for part, parameter in model.base_model.named_parameters():
            if parameter.dim() > 1 and "pooler" not in part and "relative" not in part:  # those stay float32
                parameter.copy_(parameter.bfloat16())
    for ids, start, ours in zip(inputs, starts, together, strict=True):
        (alone,) = computed.compute([ids], segment_starts=[start])
        np.testing.assert_array_equal(alone, ours)
        theirs = reference(variant, model, ids, start)
        # One logit has no direction.
        assert abs(ours - theirs).max() < 0.03 if theirs.size == 1 else cosine(ours, theirs) >= MIN_COSINE


def test_sizes_of_a_config_that_no_text_uses_take_no_memory(tmp_path: Path) -> None:
    """A table of all types and positions would have the product of both, and a step the longest text that is named."""
    folder, _ = write(tmp_path / "a", Variant("bert", {"type_vocab_size": 3000, "max_position_embeddings": 3000}))
    config = ModelConfig.load(folder)
    table = decoder._positions_of_types(config, Weights(folder, config, "f32", keeps_floats=True))
    assert (table.num_rows, table.num_columns) == (2 * 3000, 64)
    folder, _ = write(tmp_path / "b", Variant("modernbert", {"max_position_embeddings": 2**31 - 1, **MODERN}))
    facts = Texts(folder, settings(kernels="torch", kv_mib=2)).runner.facts
    assert facts.max_num_prefill_tokens == facts.max_model_len < 10_000


@pytest.mark.parametrize("name", ["bert", "bert, tokens", "distilbert, sequence"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_torch_program_has_the_same_bits_in_any_batch(tmp_path: Path, name: str, dtype: str) -> None:
    variant = VARIANTS[name]
    folder, _ = write(tmp_path, variant)
    computed = Texts(folder, settings(dtype=dtype, kernels="torch", kv_mib=2, threads=NUM_THREADS, tokens=256))
    inputs, starts = texts(variant)
    for ids, start, ours in zip(inputs, starts, computed.compute(inputs, segment_starts=starts), strict=True):
        (alone,) = computed.compute([ids], segment_starts=[start])
        np.testing.assert_array_equal(alone, ours)


def test_each_pooling_is_that_of_its_name(tmp_path: Path) -> None:
    folder, model = write(tmp_path, VARIANTS["bert"])
    computed = Texts(folder, settings(kernels="torch", kv_mib=2))
    ids = random_ids(70, 7)
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    numbers = np.arange(1, 71)[:, None]
    expected = {
        Pooling.CLS: states[0],
        Pooling.LAST: states[-1],
        Pooling.MEAN: states.mean(0),
        Pooling.MAX: states.max(0),
        Pooling.MEAN_SQRT_LEN: states.sum(0) / 70**0.5,
        Pooling.WEIGHTED_MEAN: (states * numbers).sum(0) / numbers.sum(),
        Pooling.ALL: states,
    }
    assert expected.keys() == {*Pooling} - {Pooling.NONE}
    for pooling, vector in expected.items():
        (ours,) = computed.compute([ids], pooling)
        np.testing.assert_allclose(ours, vector, rtol=0, atol=MAX_ERROR)
