"""A checkpoint in transformers, to compare with: which folder it is in, prompts for it, its logits and greedy texts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from pipeline.cli.check.cases import NUM_GREEDY, PREFIX, CheckPlan, Ids, Logits, Ours, Theirs
from pipeline.config.settings import Settings
from pipeline.runtime.model_folder import ModelConfig
from pipeline.runtime.rust_panics import panics_as_errors
from pipeline.stages.prepare.progress import Silence
from pipeline.stages.prepare.sources.source import FolderSource, HubSource, ModelError, parse

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way.\n\n"
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "1. 17 + 25 = 42\n2. 3 × 14 = 42\n"
)
SHORT = (1, 5, 17)
"""Lengths of the shortest prompts: one id, less than a block, a little more than one."""


def checkpoint_folder(settings: Settings) -> Path:
    """Where transformers finds what `settings.model` names. Raises ModelError where that is no Hugging Face folder."""
    match parse(settings.model):
        case FolderSource(path):
            return path
        case HubSource() as source:
            from pipeline.stages.prepare.sources.hub import fetch

            return fetch(source, Silence()).folder
    raise ModelError(
        f"model {settings.model!r}: what is checked is a folder in Hugging Face layout, a hub id, or a config.json: "
        "what transformers reads too"
    )


def plan_of(folder: Path, num_tokens: int) -> CheckPlan:
    """Prompts for a prepared model: a text of so many ids, one that shares its beginning, ids at random, short ones.

    Raises ModelError where the model's context is too short for the longest.
    """
    config = ModelConfig.load(folder)
    if num_tokens + NUM_GREEDY > config.max_position:
        raise ModelError(
            f"the model's context is {config.max_position} tokens, and --tokens {num_tokens} with {NUM_GREEDY} "
            f"generated ones is more: lower --tokens"
        )
    try:
        with panics_as_errors():
            ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"the model's tokenizer cannot encode the text of the check: {error}") from error
    ids = [token for token in ids if token < config.vocab_size] or [0]
    text = (ids * (num_tokens // len(ids) + 1))[:num_tokens]
    random = np.random.default_rng(0).integers(0, config.vocab_size, num_tokens).tolist()
    sharing = text[:PREFIX] + random[: num_tokens // 4]
    return CheckPlan([text, sharing, random[num_tokens // 3 :], *(text[-length:] for length in SHORT)])


class Reference:
    """The checkpoint's own model, float32. Raises ModelError where transformers can't load it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"transformers can't load {folder}: {error}") from error
        self._model = model.eval()

    def compute(self, plan: CheckPlan, ours: Ours) -> Theirs:
        """What it makes of the plan, and of all that we have logits for.

        What is not exact has its matrices in bfloat16, so they are rounded here too; a model can't be asked for exact
        logits after that.
        """
        if not ours.exact:
            self._round()
        texts = [self._greedy(prompt) for prompt in plan.prompts]
        return Theirs(self._logits({made.ids for made in ours.made}), texts)

    @torch.inference_mode()
    def _logits(self, wanted: Iterable[Ids]) -> dict[Ids, Logits]:
        """The longest first: a forward pass yields the logits of all beginnings with them."""
        missing = set(wanted)
        found: dict[Ids, Logits] = {}
        for ids in sorted(missing, key=len, reverse=True):
            if ids not in found:
                rows = self._model(torch.tensor([ids])).logits[0].float().numpy()
                for end in range(1, len(ids) + 1):
                    if ids[:end] in missing:
                        found.setdefault(ids[:end], rows[end - 1].copy())
        return found

    @torch.inference_mode()
    def _greedy(self, prompt: list[int]) -> list[int]:
        """With transformers' own cache."""
        output: list[int] = []
        step = self._model(torch.tensor([prompt]), use_cache=True)
        while True:
            output.append(int(step.logits[0, -1].argmax()))
            if len(output) == NUM_GREEDY:
                return output
            step = self._model(torch.tensor([output[-1:]]), past_key_values=step.past_key_values, use_cache=True)

    @torch.no_grad()
    def _round(self) -> None:
        for parameter in self._model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())
