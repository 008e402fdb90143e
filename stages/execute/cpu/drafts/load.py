"""Loads what proposes ids on a CPU, and imports it only then."""

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.backend import Library
from pipeline.stages.execute.cpu.program import Program
from pipeline.stages.execute.drafts.speculation import Proposer
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.weights import Weights


def load_proposer(
    settings: Settings,
    rows: RowTable,
    kv: KVPlan,
    num_threads: int,
    target: tuple[ModelConfig, Weights, Program, Library | None],
) -> Proposer | None:
    """The proposer for a model, which `target` describes; None for n-grams."""
    if settings.speculative.method == "ngram":
        return None
    from pipeline.stages.execute.cpu.drafts.draft_model import load_proposer
    from pipeline.stages.execute.cpu.drafts.eagle import Target

    return load_proposer(settings, rows, kv, num_threads, Target(*target))
