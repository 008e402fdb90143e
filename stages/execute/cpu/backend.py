"""Chooses the CPU's back end when the executor starts."""

import hashlib
import logging
import platform
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline import torch_needed
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.cpu import build, compiler, native_library
from pipeline.kernels.cpu.isa import Isa, available, cpuinfo, identity
from pipeline.kernels.step_inputs import StepInputs
from pipeline.runtime.messages import Backend
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.kept_library import NOTHING_KEPT, KeptLibrary
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.native.supported import unsupported
from pipeline.stages.execute.cpu.program import Program, ProgramPlan
from pipeline.stages.execute.cpu.ranks.group import RankGroup
from pipeline.stages.execute.cpu.ranks.pp_link import PPLink
from pipeline.stages.execute.ranks.context import RankContext
from pipeline.stages.execute.ranks.share import share_of, unevenness

if TYPE_CHECKING:
    from pipeline.stages.execute.cpu.pytorch.program import TorchProgram


class Library(NamedTuple):
    """The native library for an instruction set."""

    isa: Isa
    loaded: CDLL
    code: str
    """A digest of its sources, as `build.code_of`."""
    is_quick: bool = False
    """Compiled for a first start; the optimized library computes the same bits a little faster."""


AMX_PREFILL_TOKENS = 384
"""Tokens of a step of prompts alone, for float weights on AMX: it computes them 26 % faster than steps of 96. Other
kernels gain nothing from longer chunks."""


def max_num_prefill_tokens(
    settings: Settings, config: ModelConfig, library: Library | None, are_quantized: bool
) -> int:
    """The most tokens of a step in which no row decodes: the setting, or what suits the kernels. For an encoder, as
    many as its longest text has, if that is more."""
    schedule = settings.schedule
    if not config.causal:
        return max(config.longest_sequence(settings.max_model_len), schedule.encoder_step_tokens)
    suits_amx = library is not None and library.isa == "amx" and not are_quantized
    chosen = schedule.max_num_prefill_tokens or (AMX_PREFILL_TOKENS if suits_amx else 0)
    return max(schedule.max_num_batched_tokens, chosen)


def make_program(
    library: Library | None, plan: ProgramPlan, *, torch_program: "type[TorchProgram] | None" = None
) -> Program:
    """An empty program of the native library, or of torch if that is None: a `torch_program`, by default
    TorchProgram."""
    if library is None:
        # Imported here: the CPU library needs no torch, whose import takes most of a start.
        import torch

        from pipeline.stages.execute.cpu.pytorch.program import TorchProgram

        torch.set_num_threads(plan.num_threads)
        return (torch_program or TorchProgram)(plan)
    return NativeProgram(library.loaded, library.isa, plan)


def link(library: Library | None, context: RankContext, inputs: StepInputs, config: ModelConfig) -> PPLink | None:
    """The memory that the stages of a pipeline share; None if there is one stage. Raises UserError if the model needs
    torch."""
    if context.num_stages == 1:
        return None
    if library is None:
        raise UserError(
            f"execute.pipeline_parallel: {context.num_stages} stages need the CPU library, but torch computes this "
            "model here"
        )
    return PPLink(library.loaded, context, inputs.max_num_tokens, config.hidden_size, inputs.max_num_rows)


def join(library: Library | None, settings: Settings, config: ModelConfig, context: RankContext) -> RankGroup:
    """A rank's view of its group. Raises UserError if the model can't be cut into so many ranks, or needs torch."""
    share = share_of(config, context.rank, context.num_ranks)
    if settings.execute.kv_dtype == "int8" and context.num_ranks > config.num_kv_heads:
        # The factors of a key (native/key_calibration.py) come from all its queries, which several ranks would have.
        raise UserError(
            f"execute.kv_dtype: 'int8' is possible with at most as many ranks as KV heads, {config.num_kv_heads}; "
            f"execute.tensor_parallel is {context.num_ranks}"
        )
    if context.number == 0 and (warning := unevenness(config, context.num_ranks)):
        logging.getLogger("pipeline").warning("%s", warning)
    if library is None:
        raise UserError(
            f"execute.tensor_parallel: {context.num_ranks} ranks need the CPU library, but torch computes this "
            "model here"
        )
    return RankGroup(library.loaded, context, share)


def choose_library(
    settings: Settings,
    config: ModelConfig,
    kept: KeptLibrary = NOTHING_KEPT,
    compiling: Callable[[bool], object] = lambda _: None,
) -> Library | None:
    """The library of the back end in `execute.kernels`, by default the fastest of this machine; None for torch. An
    executor that replaces another one takes the same back end, and the library that was kept for it. `compiling` is
    called before (True) and after (False) a library may be compiled.

    Raises UserError if that back end can't compute this model here.
    """
    log = logging.getLogger("pipeline")
    wanted: str = settings.execute.kernels
    named = f"execute.kernels is {wanted!r}"
    if kept.before is not None:
        wanted = kept.before.kernels
        named = f"the executor before computed with {wanted!r}"
    if wanted == "torch" or (wanted == "auto" and settings.execute.dtype != "bfloat16"):
        torch_needed.require(named if wanted == "torch" else f"execute.dtype={settings.execute.dtype!r}")
        return None
    try:
        isas = available()
    except ValueError as error:
        raise UserError(str(error)) from error
    if wanted != "auto" and wanted not in isas:
        raise UserError(f"{named}, but this CPU supports {', '.join(isas)} and torch")
    problem = unsupported(config)
    if settings.execute.dtype != "bfloat16":
        problem = f"these kernels compute with bfloat16, but execute.dtype is {settings.execute.dtype!r}"
    # An older compiler or system may lack just the newest instructions.
    candidates = isas[:2] if wanted == "auto" else [isa for isa in isas if isa == wanted]
    if kept.before is not None and not problem and (library := _kept(kept, kept.before, candidates[0], log)):
        return library
    root = cache_root(settings)
    for isa in [] if problem else candidates:
        compiling(True)
        try:
            path = build.build(isa, log.info, cache_root=root, quick=True)
            library = Library(isa, native_library.load(path), build.code_of(isa), path.name.endswith(build.QUICK_END))
        except (compiler.CompileError, native_library.IsaUnavailableError, OSError) as error:
            # OSError: the library was replaced just now.
            problem = str(error)
            if isa != candidates[-1]:
                log.warning("instruction set %s is not available: %s", isa, problem)
        except compiler.BuildError as error:
            problem = str(error)
            break
        else:
            _keep(kept, library.loaded, log)
            return library
        finally:
            compiling(False)
    if wanted == "auto":
        _fall_back(problem, log)
        return None
    raise UserError(f"{named}, but {problem}")


def cache_root(settings: Settings) -> Path | None:
    """The folder of the user's cache; None for the default."""
    return Path(settings.cache_dir).expanduser() if settings.cache_dir else None


def _fall_back(problem: str | None, log: logging.Logger) -> None:
    """Compute with torch. Raises UserError if it isn't installed."""
    if not torch_needed.is_installed():
        raise UserError(
            f"the CPU library can't compute this model here: {problem}; PyTorch could, several times slower, but is "
            f"not installed: {torch_needed.how_to_get()}"
        )
    log.warning("computing with torch, which is several times slower: %s", problem)


def _kept(kept: KeptLibrary, before: Backend, isa: Isa, log: logging.Logger) -> Library | None:
    """The predecessor's library; None if it can't be used. Then one that computes the same may be compiled."""
    try:
        loaded = kept.load()
    except (OSError, native_library.IsaUnavailableError) as error:
        log.warning("cannot use the library of the previous executor: %s", error)
        return None
    if loaded is None:
        return None
    if before.code != build.code_of(isa):
        log.warning("computing with the kernels of this server's start; a new server uses those of the new version")
    return Library(isa, loaded, before.code)


def _keep(kept: KeptLibrary, loaded: CDLL, log: logging.Logger) -> None:
    try:
        kept.keep(loaded)
    except OSError as error:
        log.warning("the kernels are not kept for a successor of this executor, which compiles them again: %s", error)


def code_of_torch() -> str:
    """A digest of what decides the numbers of the torch program: torch's version, and the kind of CPU, by which its
    libraries choose kernels."""
    import torch  # which computes: it is loaded already

    kind = f"{torch.backends.cpu.get_cpu_capability()}\n{identity(platform.machine(), cpuinfo())}"
    return hashlib.sha256(f"{torch.__version__}\n{kind}".encode()).hexdigest()[:12]


def library_of_draft(settings: Settings, config: ModelConfig, library: Library | None) -> Library | None:
    """The library for what proposes ids beside a model that computes with `library`. Its numbers decide which ids are
    proposed, not which are sampled, so it needs no back end of its own."""
    return library if library is not None and unsupported(config) is None else choose_library(settings, config)
