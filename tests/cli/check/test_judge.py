"""How models are shrunk, and which differences are allowed."""

from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from pipeline.cli.check.cases import CheckPlan, ComputedCase, ProgramResults, ReferenceResults
from pipeline.cli.check.judge import judge
from pipeline.stages.prepare.check_model import random_checkpoint
from tests.cli.check.checked import CONFIGS

pytestmark = pytest.mark.usefixtures("check_model_state")


# --- shrunk models keep their kind


def shrunk(config: dict[str, Any]) -> Any:
    full = AutoConfig.for_model(**config)
    return AutoConfig.for_model(**{**config, **random_checkpoint.shrink(full)})


def test_a_shrunk_model_keeps_its_ratios_and_kinds() -> None:
    smol = shrunk(CONFIGS["SmolLM2"])
    assert smol.num_attention_heads / smol.num_key_value_heads == 3
    assert smol.hidden_size == smol.num_attention_heads * smol.head_dim
    mistral = shrunk(CONFIGS["Mistral"])
    assert mistral.hidden_size != mistral.num_attention_heads * mistral.head_dim
    assert mistral.sliding_window == 24
    qwen = shrunk(CONFIGS["Qwen2.5"])
    assert qwen.layer_types == ["full_attention"] * 3 + ["sliding_attention"]
    llama = shrunk(CONFIGS["Llama 3.2"])
    assert llama.rope_parameters["rope_type"] == "llama3" and llama.rope_parameters["factor"] == 32.0
    assert llama.rope_parameters["original_max_position_embeddings"] == 64
    kinds = ["full_attention"] * 11 + ["sliding_attention"]
    assert random_checkpoint._fewer(kinds, 4) == ["full_attention"] * 3 + ["sliding_attention"]


# --- tolerances

PLAN = CheckPlan([[1, 2, 3]])


def sides(change: float = 0.0, text: int = 7, exact: bool = True) -> tuple[ProgramResults, ReferenceResults]:
    """One prompt with a text of one id; transformers has two nearly equal ones: 7 and 8."""
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    logits[7], logits[8] = 5.0, 4.9999
    ours = logits.copy()
    ours[3] += change
    rounded = logits + np.float32(0.02) * np.random.default_rng(1).standard_normal(100).astype(np.float32)
    return (
        ProgramResults("any", exact, [ComputedCase("whole", (1, 2, 3), ours)], {"whole": [[text]]}),
        ReferenceResults({(1, 2, 3): logits}, [[7]], {} if exact else {(1, 2, 3): rounded}),
    )


def test_a_difference_is_allowed_up_to_its_bound() -> None:
    for change, passes in ((0.0, True), (5e-5, True), (1e-3, False), (float("nan"), False), (float("inf"), False)):
        (finding,) = judge(PLAN, *sides(change))
        assert finding.passed == passes


def test_a_rounded_program_may_lose_as_much_as_transformers_in_bfloat16() -> None:
    (finding,) = judge(PLAN, *sides(0.1, exact=False))
    assert finding.passed and 0.005 < finding.worst == finding.difference < finding.allowed == finding.allowed_worst
    assert 0.01 < finding.allowed < 0.02
    for change in (0.4, 5.0, float("nan")):
        (finding,) = judge(PLAN, *sides(change, exact=False))
        assert not finding.passed


def test_vectors_of_a_model_without_texts_are_judged_by_their_own_size() -> None:
    """A vector twenty times as large may differ twenty times as much, and no other one."""
    vector = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    vectors: dict[tuple[int, ...], Any] = {(1,): vector, (2,): 20 * vector}
    for changed, change, passes in ((2, 1e-3, True), (1, 5e-5, True), (1, 1e-3, False), (2, 1e-2, False)):
        made = [
            ComputedCase("whole", ids, theirs + np.float32(change if ids == (changed,) else 0))
            for ids, theirs in vectors.items()
        ]
        ours = ProgramResults("any", True, made, {"whole": [[]]})
        (finding,) = judge(PLAN, ours, ReferenceResults(vectors, [[]]))
        assert (finding.passed, finding.num_texts) == (passes, 0), (changed, change)


def test_one_bad_row_among_many_fails() -> None:
    ours, theirs = sides(exact=False)
    for first in range(10, 200):
        ours.made.append(ComputedCase("whole", (first,), theirs.logits[1, 2, 3]))
        theirs.logits[first,], theirs.bfloat16[first,] = theirs.logits[1, 2, 3], theirs.bfloat16[1, 2, 3]
    assert judge(PLAN, ours, theirs)[0].passed
    ours.made[-1] = ComputedCase("whole", (199,), theirs.logits[1, 2, 3] + 0.05 * np.float32(np.arange(100) % 7))
    (finding,) = judge(PLAN, ours, theirs)
    assert finding.difference < finding.allowed and finding.worst > finding.allowed_worst and not finding.passed


def test_some_rows_may_have_other_experts_in_a_mixture() -> None:
    """But most must not differ more than in transformers, and none as much as unrelated logits or NaNs."""
    ours, theirs = sides(exact=False)
    ours.chooses_experts = True
    for first in range(10, 20):
        ours.made.append(ComputedCase("whole", (first,), theirs.logits[1, 2, 3]))
        theirs.logits[first,], theirs.bfloat16[first,] = theirs.logits[1, 2, 3], theirs.bfloat16[1, 2, 3]
    changed = theirs.logits[1, 2, 3] + 0.1 * np.float32(np.arange(100) % 7)
    ours.made[-1] = ComputedCase("whole", (19,), changed)
    assert judge(PLAN, ours, theirs)[0].passed
    for row in (theirs.logits[1, 2, 3][::-1] * 2, np.full(100, np.nan, np.float32)):
        ours.made[-1] = ComputedCase("whole", (19,), row)
        assert not judge(PLAN, ours, theirs)[0].passed
    for i in range(6):
        ours.made[-1 - i] = ComputedCase("whole", (19 - i,), changed)
    assert not judge(PLAN, ours, theirs)[0].passed


def test_a_text_may_differ_only_where_transformers_is_undecided() -> None:
    (finding,) = judge(PLAN, *sides(text=8))
    assert finding.passed and (finding.num_same, finding.num_undecided) == (0, 1)
    (finding,) = judge(PLAN, *sides(text=9))
    assert not finding.passed and (finding.num_same, finding.num_undecided) == (0, 0)


def test_a_text_that_diverges_without_reference_logits_fails() -> None:
    ours, theirs = sides(text=8)
    theirs = ReferenceResults({(1, 2): theirs.logits[1, 2, 3]}, theirs.texts)
    ours.made = [ComputedCase("whole", (1, 2), theirs.logits[1, 2])]
    (finding,) = judge(PLAN, ours, theirs)
    assert not finding.passed
