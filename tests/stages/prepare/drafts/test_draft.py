"""The draft model of speculative decoding is prepared, checked and linked."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Settings, SpeculativeSettings
from pipeline.runtime.model.draft_link import draft_link
from pipeline.runtime.transport.inbox import address_of
from pipeline.stages.prepare import stage
from pipeline.stages.prepare.drafts.draft import require_same_tokens
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare.checkpoints import save_folder, tiny_llama
from tests.stages.prepare.encoders.test_sentence_transformers import LAST, add_modules
from tests.stages.prepare.test_stage import launch, run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return save_folder(root / "large", tiny_llama()), save_folder(root / "small", tiny_llama(num_hidden_layers=1))


def test_a_draft_model_is_linked_for_the_executor(folders: tuple[Path, Path], tmp_path: Path) -> None:
    large, small = map(str, folders)
    speculative = SpeculativeSettings(method="draft_model", draft=small)
    settings = Settings(model=large, cache_dir=str(tmp_path), speculative=speculative)
    for _ in range(2):  # the second start replaces the link
        run(settings)
        assert draft_link(settings).resolve() == prepare(Settings(model=small, cache_dir=str(tmp_path)))


def test_a_draft_model_with_other_tokens_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    ours, theirs = (prepare(Settings(model=str(one), cache_dir=str(tmp_path))) for one in folders)
    require_same_tokens(ours, theirs, "small")
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = json.loads((theirs / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"speculative\.draft: small has other tokens than the model"):
        require_same_tokens(ours, other, "small")


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_model_that_generates_no_text_is_refused_by_the_setting(
    folders: tuple[Path, Path], tmp_path: Path, method: Any
) -> None:
    model = save_folder(tmp_path / "embedder", tiny_llama())
    add_modules(model, "Pooling", Pooling=LAST)
    speculative = SpeculativeSettings(method=method, draft=str(folders[1]))
    settings = Settings(model=str(model), cache_dir=str(tmp_path / "cache"), speculative=speculative)
    words = rf"speculative\.method is '{method}', but embedder generates no text \(its tasks are embed, token_embed\)"
    with pytest.raises(ModelError, match=words):
        stage.run(launch(settings, address_of("prepare-test", "supervisor.0", 1)))
