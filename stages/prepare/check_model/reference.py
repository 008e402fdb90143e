"""The transformers side of `check-model`: a checkpoint's folder, prompts for it, its logits and greedy texts."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch
from tokenizers import Tokenizer

from pipeline.cli.check.cases import NUM_GREEDY, PREFIX, CheckPlan, Ids, Logits, ProgramResults, ReferenceResults
from pipeline.config.settings import Settings
from pipeline.config.values import hf_overrides
from pipeline.runtime.model import foreign
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.check_model import gguf_reference
from pipeline.stages.prepare.check_model import pooled_reference as pooled
from pipeline.stages.prepare.check_model.random_checkpoint import why
from pipeline.stages.prepare.families.architecture import TEXT_PARTS
from pipeline.stages.prepare.files import MAX_JSON_BYTES, decode_json, shown
from pipeline.stages.prepare.progress import SilentProgress
from pipeline.stages.prepare.sources import gguf_files
from pipeline.stages.prepare.sources.cached_names import source_of
from pipeline.stages.prepare.sources.folder import has_quantized_weights
from pipeline.stages.prepare.sources.hub.local import find_or_fetch
from pipeline.stages.prepare.sources.source import (
    FolderSource,
    GgufSource,
    HubSource,
    ModelError,
    WheelSource,
)
from pipeline.stages.prepare.stage import check_of, gguf_file

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way.\n\n"
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "1. 17 + 25 = 42\n2. 3 × 14 = 42\n"
)
SHORT = (1, 5, 17)
"""Lengths of the shortest prompts: one id, less than a block, slightly more than a block."""


def checkpoint(settings: Settings) -> Path:
    """The folder or .gguf file of `settings.model` for transformers. Raises ModelError if transformers doesn't read it,
    or if it is a folder with quantized weights."""
    match source_of(settings.model, Cache.of(settings).root):
        case FolderSource(path):
            if (gguf := gguf_files.only_model_in(path)) is not None:
                return gguf_files.parts_of(gguf)[0]
            return _with_floats(path, settings.model)
        case GgufSource() | WheelSource():
            return gguf_files.parts_of(gguf_file(settings, SilentProgress()))[0]
        case HubSource() as source:
            timeout_s = settings.supervisor.prepare_timeout_s
            snapshot = find_or_fetch(source, SilentProgress(), check_of(settings), timeout_s)
            return snapshot.ggufs[0] if snapshot.ggufs else _with_floats(snapshot.folder, settings.model)
        case never:
            assert_never(never)


def how_compared(source: Path, folder: Path, num_tokens: int) -> list[str]:
    """Lines that say what is compared, if that is not all. `source` is the checkpoint and `folder` what prepare made of
    it, `num_tokens` the length of the longest prompt. Raises ModelError if transformers reads another model of the
    checkpoint."""
    if not gguf_reference.is_gguf(source):
        return []
    return gguf_reference.how_compared(source, ModelConfig.load(folder), num_tokens + NUM_GREEDY)


def _with_floats(folder: Path, model: str) -> Path:
    """Raises ModelError if the weights are quantized: they are not converted to the floats that transformers has."""
    if has_quantized_weights(folder):
        raise ModelError(
            f"model {model!r} has quantized weights: check-model compares float weights with transformers. Check the "
            "architecture with the unquantized checkpoint or the config.json alone, and the kernels with --fidelity"
        )
    return folder


def plan_of(folder: Path, num_tokens: int) -> CheckPlan:
    """Prompts for a prepared model: a text of `num_tokens`, one with the same prefix, random ids, and short prompts.

    Raises ModelError if the longest prompt exceeds the model's context.
    """
    config = ModelConfig.load(folder)
    if num_tokens + NUM_GREEDY > config.max_position:
        raise ModelError(
            f"--tokens {num_tokens} and {NUM_GREEDY} generated tokens exceed the model's context of "
            f"{config.max_position} tokens: lower --tokens"
        )
    try:
        with panics_as_errors():
            ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"the model's tokenizer cannot encode the text of the check: {error}") from error
    ids = [token for token in ids if token < config.vocab_size] or [0]
    text = (ids * (num_tokens // len(ids) + 1))[:num_tokens]
    random = np.random.default_rng(0).integers(0, config.vocab_size, num_tokens).tolist()
    if config.position_offset and not config.causal:
        # transformers does not count padding tokens as positions, and no text has them.
        random = [token if token != config.position_offset - 1 else token + 1 for token in random]
    sharing = text[:PREFIX] + random[: num_tokens // 4]
    return CheckPlan([text, sharing, random[num_tokens // 3 :], *(text[-length:] for length in SHORT)])


class Reference:
    """The checkpoint in transformers, float32. Raises ModelError if transformers can't load it."""

    def __init__(self, folder: Path, overrides: str = "", prepared: Path | None = None) -> None:
        """`folder` may be a .gguf file, of which prepare has made `prepared`; `overrides` is the setting
        `hf_overrides`."""
        self._folder, self._overrides, self._prepared = folder, hf_overrides.parse(overrides), prepared
        config = None if prepared is None else ModelConfig.load(prepared)
        self._pooled = prepared if config is not None and not config.generates else None
        """The prepared folder of a model that generates no text."""
        self._model = self._load(torch.float32)

    def compute(self, plan: CheckPlan, ours: ProgramResults) -> ReferenceResults:
        """The greedy texts of the plan's prompts, and logits for every sequence that `ours` has logits for.

        Inexact programs have matrices in bfloat16, so this rounds the model's matrices too. That is permanent: compute
        exact programs first. Their bound is what transformers loses in bfloat16, so this computes that as well.
        """
        wanted = {made.ids for made in ours.made}
        if ours.exact:
            return ReferenceResults(self._logits(self._model, wanted), self._greedy_texts(plan))
        self._round()
        exact, texts = self._logits(self._model, wanted), self._greedy_texts(plan)
        return ReferenceResults(exact, texts, self._logits(self._load(torch.bfloat16), wanted))

    def _logits(self, model: Any, wanted: Iterable[Ids]) -> dict[Ids, Logits]:
        if self._pooled is None:
            return _logits(model, wanted)
        return pooled.results_of(model, wanted, self._folder, self._pooled)

    def _load(self, dtype: torch.dtype) -> Any:
        if self._prepared is not None and gguf_reference.is_gguf(self._folder):
            return gguf_reference.load(self._folder, dtype, ModelConfig.load(self._prepared))
        return _load(self._folder, dtype, self._overrides, is_pooled=self._pooled is not None)

    def _greedy_texts(self, plan: CheckPlan) -> list[list[int]]:
        if self._pooled is not None:
            return [[] for _ in plan.prompts]
        return [self._greedy(prompt) for prompt in plan.prompts]

    @torch.inference_mode()
    def _greedy(self, prompt: list[int]) -> list[int]:
        """Greedy ids after a prompt, with transformers' KV cache."""
        output: list[int] = []
        step = self._model(torch.tensor([prompt]), use_cache=True)
        while True:
            output.append(int(step.logits[0, -1].argmax()))
            if len(output) == NUM_GREEDY:
                return output
            step = self._model(torch.tensor([output[-1:]]), past_key_values=step.past_key_values, use_cache=True)

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._model.named_parameters():
            if self._pooled is not None and not pooled.is_rounded(name, self._model):
                continue
            # prepare stores convolutions in float32
            if parameter.dim() > 1 and "conv1d" not in name and "conv.conv" not in name:
                parameter.copy_(parameter.bfloat16())


def _load(folder: Path, dtype: torch.dtype, overrides: Mapping[str, Any], *, is_pooled: bool = False) -> Any:
    """The checkpoint in transformers. Raises ModelError if transformers can't load it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    how: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "trust_remote_code": False}
    config = decode_json(folder / "config.json", MAX_JSON_BYTES, dict[str, Any])
    foreign.register(config.get("model_type"))
    if config.get("attn_logit_softcapping"):
        how["attn_implementation"] = "eager"  # the default ignores softcaps
    loader: Any = AutoModelForImageTextToText if config.get("model_type") in TEXT_PARTS else AutoModelForCausalLM
    if is_pooled:
        loader = pooled.loader_of(config, is_encoder=True)
    try:
        if overrides:
            config = hf_overrides.applied(config, overrides)
            keys = {key: value for key, value in config.items() if key != "model_type"}
            how["config"] = AutoConfig.for_model(config["model_type"], **keys)
        model, info = loader.from_pretrained(folder, **how, output_loading_info=True)
    except Exception as error:  # transformers documents no exceptions
        raise ModelError(f"transformers can't load {folder}: {why(error, config)}") from error
    _compute_in_sequence(model)
    if missing := sorted(key for key in info["missing_keys"] if not (is_pooled and key.startswith("pooler."))):
        raise ModelError(
            f"{folder}: transformers finds no weights for {shown(missing[0])} and makes up {len(missing)} tensors, so "
            "there is nothing to compare with"
        )
    return model.eval()


def _compute_in_sequence(model: Any) -> None:
    """Have recurrent layers compute prompts token by token, as they are defined. transformers' form in chunks differs
    from that by more than rounding of another order does, in float32 by up to 1.5e-4."""
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        if hasattr(module, "torch_chunk_gated_delta_rule"):
            module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule  # type: ignore[attr-defined]


@torch.inference_mode()
def _logits(model: Any, wanted: Iterable[Ids]) -> dict[Ids, Logits]:
    """Logits after each sequence, longest first: one forward pass also covers all prefixes of a sequence."""
    missing = set(wanted)
    found: dict[Ids, Logits] = {}
    for ids in sorted(missing, key=len, reverse=True):
        if ids not in found:
            rows = model(torch.tensor([ids])).logits[0].float().numpy()
            for end in range(1, len(ids) + 1):
                if ids[:end] in missing:
                    found.setdefault(ids[:end], rows[end - 1].copy())
    return found
