"""A program that a CPU computes: a `ProgramBuilder` that records its ops, then runs them for each step."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.config.settings import Settings
from pipeline.kernels.sampling.logprob_inputs import FloatArray, ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import IntArray, StepInputs
from pipeline.lora.adapter_file import AdapterFile
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import LoraPlan
from pipeline.stages.execute.kv import KVPlan, SwapArray
from pipeline.stages.execute.program import AttentionWeights, LogitArray, ProgramBuilder
from pipeline.stages.execute.ranks.layer_split import Part

if TYPE_CHECKING:
    from pipeline.stages.execute.cpu.native.panel_file import PanelLocation
    from pipeline.stages.execute.cpu.ranks.group import RankGroup
    from pipeline.stages.execute.cpu.ranks.pp_link import PPLink


class EncodedRows(NamedTuple):
    """The encoder cache, whose rows negative ids stand for: ~i for row i."""

    rows: FloatArray | None
    """float32 [rows, (1 + num_layers) * hidden_size]. None: this rank is not the first one, which reads them."""
    num_layers: int = 0
    """Behind each of so many first layers, the next `hidden_size` numbers of a row are added."""


NOTHING_ENCODED = EncodedRows(None)


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """What a program is made for. Its ops read and write these arrays in each step."""

    settings: Settings
    """With the precision of activations that was chosen."""
    config: ModelConfig
    inputs: StepInputs
    sampling_inputs: SamplingInputs
    scores: ScoreInputs
    kv: KVPlan
    """Of the layers in `part`."""
    num_threads: int
    swap: SwapArray | None = None
    panels: "PanelLocation | None" = None
    """Where the library keeps packed matrices."""
    lora: LoraPlan | None = None
    """None: no adapters can be loaded."""
    ranks: "RankGroup | None" = None
    """With these, it computes a rank's share, and meets the others at barriers."""
    part: Part | None = None
    """Its layers; None: all."""
    encoded: EncodedRows = NOTHING_ENCODED
    """By default, no id is negative."""
    link: "PPLink | None" = None
    """To the other stages of a pipeline: it shows there how far it is."""


class MasksLate(RuntimeError):
    """Grammar masks did not arrive in time."""


class Program(ProgramBuilder):
    """A forward pass over the arrays of one `StepInputs`, one `SamplingInputs` and one `ScoreInputs`."""

    name: str
    """The back end, for logs."""

    captured_layers: tuple[int, ...] = ()
    """The layers before which each step keeps the hidden states."""

    def capture(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states before each of these layers, in rising order. Called before any is recorded."""
        self.captured_layers = layers

    def hidden_states(self) -> LogitArray:
        """Of the last step: float32 [tokens, hidden_size * captured layers], or without such, `residual`. Valid until
        the next step."""
        return self.captured() if self.captured_layers else self.residual()

    @abstractmethod
    def captured(self) -> LogitArray:
        """Hidden states before each of the captured layers in the last step, side by side."""

    @abstractmethod
    def attention_of_given(self, weights: AttentionWeights, width: int) -> None:
        """Record `attention` whose queries, keys and values come from `given`, not from norm(residual)."""

    @abstractmethod
    def given(self) -> LogitArray:
        """What attention reads in the step in the inputs, float32 [tokens, width]; the caller writes it before."""

    def finish_loading(self) -> None:
        """Called once after the model is recorded."""

    @abstractmethod
    def borrow_head(self, other: "Program") -> None:
        """Use the LM head's memory of another program of the same back end. Called before `sample`, which must have
        the same head."""

    @abstractmethod
    def run(self) -> IntArray:
        """Compute the step in the inputs. Returns the sampled ids, int32 [samples]; `NO_ID` if none can be sampled."""

    @abstractmethod
    def sample_again(self) -> IntArray:
        """Sample again for the step before, which has raised `MasksLate`. The layers are not computed again: those with
        a recurrent state have absorbed the step."""

    @abstractmethod
    def score(self) -> None:
        """Compute the logprobs that the `ScoreInputs` request for tokens of the last step. Overwrites `logits`."""

    @abstractmethod
    def residual(self) -> LogitArray:
        """Hidden states of the last step before the last norm: float32 [tokens, hidden_size]. Valid until the next
        step."""

    @abstractmethod
    def wait_for(self, word: int, expected: int, timeout_ms: int) -> None:
        """Make the next steps wait before sampling until the uint32 at address `word` equals `expected`. Address 0
        turns that off. After `timeout_ms` a step raises `MasksLate`, and its rows get no ids."""

    @abstractmethod
    def copy_blocks(self, sources: IntArray, targets: IntArray, other: SwapArray | None = None) -> None:
        """Copy KV blocks with all layers, in order; int32. Ids from the number of KV blocks on are swap blocks, or
        those of `other`, which is [blocks, bytes of a block]."""

    @abstractmethod
    def copy_states(self, swapped: SwapArray, sources: IntArray, targets: IntArray) -> None:
        """Copy slots of states, in order; int32. Ids from the number of slots on are those of `swapped`, which is
        [slots, bytes of a slot]."""

    @abstractmethod
    def logits(self) -> LogitArray:
        """Logits of the last step: float32 [samples, vocab_size]. Complete only after `keep_logits`, because sampling
        may not need all of them."""

    @abstractmethod
    def keep_logits(self) -> None:
        """Keep all logits of every later step."""

    @abstractmethod
    def pack_adapter(self, file: AdapterFile) -> Any:
        """A LoRA adapter as `put_adapter` takes it. Any thread may call this, also while a step runs."""

    @abstractmethod
    def put_adapter(self, slot: int, packed: Any) -> None:
        """Put an adapter into a slot, which rows of later steps name in `StepInputs.adapters`. No step may run."""

    @abstractmethod
    def close(self) -> None:
        """Free threads and memory."""
