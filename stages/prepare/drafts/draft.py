"""Prepares the draft model of speculative decoding, and checks that its tokens are those of the model."""

import json
import os
from pathlib import Path

import msgspec

from pipeline.config.settings import Settings
from pipeline.own_files import OpenFolder, make_folder
from pipeline.runtime.model.draft_link import draft_link
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sources.source import ModelError

NUM_SHOWN = 3


def settings_of_draft(settings: Settings) -> Settings:
    """The settings with which `speculative.draft` is prepared: in the formats of its own files."""
    return msgspec.structs.replace(
        settings, model=settings.speculative.draft, quantization="auto", hf_overrides="", chat_template=""
    )


def require_text(config: ModelConfig, method: str) -> None:
    """Raises ModelError if the model generates no text: nothing can be proposed for it."""
    if not config.generates:
        raise ModelError(
            f"speculative.method is {method!r}, but {config.name} generates no text (its tasks are "
            f"{', '.join(config.tasks)}): set it to 'none'"
        )


def require_same_tokens(model: Path, draft: Path, name: str) -> None:
    """Raises ModelError unless every id is the same token in both prepared folders. One vocabulary may be longer."""
    ours, theirs = _tokens_of(model), _tokens_of(draft)
    differing = [token_id for token_id in ours.keys() & theirs.keys() if ours[token_id] != theirs[token_id]]
    if differing or abs(len(ours) - len(theirs)) > len(ours) // 10:
        examples = ", ".join(
            f"{token_id} is {ours[token_id]!r} and {theirs[token_id]!r}" for token_id in sorted(differing)[:NUM_SHOWN]
        )
        raise ModelError(
            f"speculative.draft: {name} has other tokens than the model ({examples or 'the numbers differ'}): choose a "
            "model of the same family"
        )


def link(settings: Settings, draft: Path, progress: Progress) -> None:
    """Let the executor find the prepared draft model or head."""
    link = draft_link(settings)
    try:
        make_folder(link.parent)
        with OpenFolder(link.parent) as folder:
            temporary = folder.path / f"{link.name}.{os.getpid()}"
            temporary.symlink_to(draft)
            temporary.replace(folder.path / link.name)
    except OSError as error:
        raise ModelError(f"cache_dir: {link.parent} can't be written: {error.strerror}") from error
    progress.say(f"draft model: {settings.speculative.draft}")


def _tokens_of(folder: Path) -> dict[int, str]:
    """The tokens of a prepared folder by id."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((token, i) for i, (token, _) in enumerate(vocab))
    tokens = {token_id: token for token, token_id in pairs}
    return tokens | {added["id"]: added["content"] for added in tokenizer.get("added_tokens", ())}
