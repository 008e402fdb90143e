"""Loads a model onto a GPU: its weights and those of what proposes ids. What is left of the memory is for KV blocks."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import LoraPlan
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.drafts.draft_model import DraftWeights
from pipeline.stages.execute.cuda.drafts.eagle import HeadWeights
from pipeline.stages.execute.cuda.model.device_model import DeviceModel
from pipeline.stages.execute.cuda.ranks.device_ranks import DeviceRanks, Join
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose KV memory is not there yet."""

    config: ModelConfig
    """Of several ranks, of this one's part."""
    model: DeviceModel
    weight_formats: str
    lora: LoraPlan | None
    ranks: DeviceRanks | None
    draft: DraftWeights | None
    """The weights of a draft model."""
    head: HeadWeights | None
    """The weights of an EAGLE head."""


def load_model(
    settings: Settings,
    model_dir: Path,
    device: Device,
    max_num_samples: int,
    weights: Weights | None = None,
    join: Join | None = None,
) -> LoadedModel:
    """Load what `CudaRunner` computes, with its arguments. Raises UserError if it can't run with these settings."""
    config, execute, schedule = ModelConfig.load(model_dir), settings.execute, settings.schedule
    dtype: torch.dtype = getattr(torch, execute.dtype)
    ranks = None if join is None else join(settings, config, device.where, max_num_samples)
    config = config if ranks is None else ranks.config
    quantization = settings.quantization if settings.quantization in ("int8", "int4") else None
    lora = LoraPlan.of(settings)
    model = DeviceModel(
        *(device, config, dtype, schedule.max_step_tokens, schedule.max_num_seqs, quantization),
        early=execute.programmatic_dependent_launch,
        adapters=lora,
        max_num_samples=max_num_samples,
        ranks=None if ranks is None else ranks.link,
    )
    # A rank converts its part only.
    weights = weights or Weights(model_dir, config, FLOAT_FORMATS[execute.dtype], keeps_floats=ranks is not None)
    if ranks is None:
        build_program(config, weights, model)
    else:
        build_program(ranks.whole, weights, ranks.cut(model, quantization))
    formats = "+".join(weights.taken)
    draft = DraftWeights.of(settings, device, config.vocab_size)
    head = HeadWeights.of(settings, device, model, config)
    return LoadedModel(config, model, formats, lora, ranks, draft, head)
