"""A text whose numbers overflow fails over ZeroMQ, with an error that says so, for each of a model's tasks. Texts in
the same steps and after it have the bits that they have without it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from pipeline import LLM, SamplingParams
from pipeline.errors import ServerFailed
from pipeline.runtime.messages import NAN_LOGITS
from tests.compiled import link_kernels
from tests.e2e.models.test_encoders import save_tiny
from tests.slices import ALL_CASES
from tests.stages.execute.encoders import test_cross_encoders
from tests.stages.prepare.checkpoints import save_folder, tiny

GOOD, BAD = "a sent text", "zq"
EMBEDDINGS = "embed_tokens.weight", "word_embeddings.weight"


class Kind(NamedTuple):
    save: Callable[[Path], Path]
    answers: Callable[[LLM, Sequence[str]], list[Any]]


def generated(llm: LLM, texts: Sequence[str]) -> list[Any]:
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(texts, params)]


KINDS = {
    "generate": Kind(lambda folder: save_folder(folder, tiny("qwen3")), generated),
    "score": Kind(
        partial(test_cross_encoders.save, kind="bert"),
        lambda llm, texts: [one.outputs.score for one in llm.score(GOOD, texts)],
    ),
    "classify": Kind(
        partial(save_tiny, variant="bert, sequence"),
        lambda llm, texts: [one.outputs.probs for one in llm.classify(texts)],
    ),
    "embed": Kind(
        partial(save_tiny, variant="bert"),
        lambda llm, texts: [one.outputs.embedding for one in llm.embed(texts)],
    ),
}


def spoil(folder: Path) -> None:
    """Make the embeddings of what only BAD has not finite."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {*tokenizer.encode(BAD, add_special_tokens=False).ids} - {*tokenizer.encode(GOOD).ids}
    assert ids
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith(EMBEDDINGS))
    tensors[name][list(ids)] = float("nan")
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("task", KINDS if ALL_CASES else ("generate", "score"))
def test_a_text_that_overflows_fails_alone(task: str, tmp_path: Path) -> None:
    kind = KINDS[task]
    folder = kind.save(tmp_path / "tiny")
    spoil(folder)
    with LLM(model=str(folder), cache_dir=str(link_kernels(tmp_path / "cache"))) as llm:
        (expected,) = kind.answers(llm, [GOOD])
        for texts in ([BAD], [GOOD, BAD, GOOD, GOOD]):
            with pytest.raises(ServerFailed, match=NAN_LOGITS):
                kind.answers(llm, texts)
        assert kind.answers(llm, [GOOD] * 3) == [expected] * 3
