"""The scheduler's resources and rules."""

from typing import Literal

import msgspec

from pipeline.config.settings import PolicyName, ScheduleSettings, SpeculativeSettings
from pipeline.runtime.messages import ExecuteFacts
from pipeline.runtime.model.kv_groups import FULL, KVGroup

PreemptionMode = Literal["auto", "swap", "recompute"]

UNLIMITED = float("inf")
MAX_TOKENS = 2**31 - 1


class StateConfig(msgspec.Struct, frozen=True):
    """Slots for the states of a model with recurrent layers (kv_cache/state_slots.py). Intervals are in tokens."""

    num_slots: int = 0
    """0 for a model without recurrent layers, else at least 2."""
    num_swap_slots: int = 0
    """Slots of swap space."""
    interval: int = 2048
    """Between regular snapshots of a prompt, a multiple of the block size: as many tokens as have the KV of a slot's
    size, or more."""
    decode_interval: int = 128
    """Between snapshots of the output, a multiple of the block size. Only the newest is kept."""
    min_interval: int = 64
    """Between any two snapshots of a sequence: chunks that end at one must not be short."""

    @classmethod
    def of(cls, facts: ExecuteFacts) -> "StateConfig":
        """From the executor's facts."""
        if not facts.num_state_slots:
            return cls()
        least = max(facts.state_tokens, cls().min_interval, facts.block_size)
        interval = 1 << (least - 1).bit_length()
        return cls(facts.num_state_slots, facts.num_swap_state_slots, interval)


class SchedulerConfig(msgspec.Struct, frozen=True):
    """The settings and the executor's facts, with UNLIMITED or MAX_TOKENS for a setting of 0."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int = 0
    """Bound of a step in which no row decodes, if it is more than `max_num_batched_tokens`."""
    block_size: int = 16
    prefix_caching: bool = True
    num_swap_blocks: int = 0
    kv_offload: bool = True
    """Whether full blocks are copied to swap space at once."""
    policy: PolicyName = "fcfs"
    preemption: PreemptionMode = "auto"
    max_step_s: float = UNLIMITED
    """Bound of a step's predicted time while any row decodes."""
    long_prompt_tokens: int = MAX_TOKENS
    """Prompts with more tokens to compute are long."""
    prompt_max_slowdown: float = UNLIMITED
    """Bound of a step with parts of prompts, relative to the step without them."""
    encode_max_slowdown: float = UNLIMITED
    """Bound of a step with a part of an encode, relative to the step without it."""
    long_prompt_max_slowdown: float = UNLIMITED
    """Bound of a step with a part of a long prompt, relative to the step without it."""
    hidden_size: int = 0
    """Dimensions of an embedding."""
    kv_groups: tuple[KVGroup, ...] = (FULL,)
    """Groups of layers with block tables of their own; full attention first."""
    num_speculative_tokens: int = 0
    """Ids that the executor can propose for a row and verify in one step; 0 without speculative decoding."""
    max_num_drafts: int = 0
    """The same for all rows of a step together."""
    adaptive_speculation: bool = True
    """Whether rows for which speculation does not pay get fewer proposals or none."""
    eos_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids, which end hypotheses of beam search."""
    max_num_top: int = 0
    """The most top logprobs of a record; 0 if any number is possible."""

    num_stages: int = 1
    """Stages of the executor's pipeline, each of which computes another step."""
    max_loras: int = 0
    """LoRA adapters of running sequences at most; 0 if adapters are off."""
    waits_for_adapters: bool = False
    """Whether the executor answers `UseAdapters`: sequences then wait for it, not steps."""
    states: StateConfig = StateConfig()
    generates: bool = True
    """Whether the model samples ids. If not, an id without meaning follows each prompt, and takes no room."""
    is_encoder: bool = False
    """Each sequence is computed whole, in the step in which it starts, and ends with it."""

    block_bytes: int = 0
    """Bytes of a KV block of one rank; 0: not known."""
    slot_bytes: int = 0
    """The same of a slot for the states."""
    num_encoder_rows: int = 0
    """Rows of the executor's encoder cache; 0 if the model takes no media."""
    max_whole_run: int = 0
    """Positions of a run of media at most that one step computes because they see each other; 0: runs may be cut."""
    sleep_cache_bytes: int = 0
    """How much of the prefix cache is kept while the server sleeps, of each rank."""

    def __post_init__(self) -> None:
        """Raises ValueError if the model has recurrent layers and a setting does not work with them."""
        if not self.states.num_slots:
            return
        if self.num_speculative_tokens:
            raise ValueError("speculative decoding is not supported for models with recurrent layers")
        if self.states.num_slots < 2:
            raise ValueError("a model with recurrent layers needs at least 2 state slots")

    def of_encoder(self, step_tokens: int) -> "SchedulerConfig":
        """This configuration for an encoder, whose steps with several texts have at most `step_tokens` tokens. It says
        all that encoders exclude. What a text leaves in the KV cache is scratch, so nothing is found in the prefix
        cache or copied to swap space. Preemption needs no rule: all of a running sequence is in a step in flight, so it
        lacks no blocks, and `PriorityPreemptor` leaves sequences that end."""
        return msgspec.structs.replace(
            self,
            is_encoder=True,
            max_num_batched_tokens=step_tokens,
            max_num_prefill_tokens=0,
            prefix_caching=False,
            num_swap_blocks=0,
            kv_offload=False,
            preemption="recompute",
        )

    @property
    def max_num_rows(self) -> int:
        """Sequences that run at once. With recurrent layers each holds a slot, and one more is left for the next
        state of one of them."""
        num_slots = self.states.num_slots
        return min(self.max_num_seqs, num_slots - 1) if num_slots else self.max_num_seqs

    @property
    def offloads(self) -> bool:
        """Whether there is swap space for copies of full blocks, and they are made and found."""
        return self.kv_offload and self.prefix_caching and self.num_swap_blocks > 0

    @property
    def max_chunk(self) -> int:
        """Positions of a sequence that a step computes at most, proposed ids included: they are within its budget,
        unless they are a run of media."""
        return max(self.max_num_batched_tokens, self.max_num_prefill_tokens, self.max_whole_run)

    @classmethod
    def of(
        cls,
        settings: ScheduleSettings,
        facts: ExecuteFacts,
        speculative: SpeculativeSettings = SpeculativeSettings(),  # noqa: B008
        max_loras: int = 0,
        num_stages: int = 1,
        sleep_cache_bytes: int = 0,
    ) -> "SchedulerConfig":
        """From the settings and the executor's facts."""
        config = cls(
            num_blocks=facts.num_blocks,
            max_model_len=facts.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_prefill_tokens=facts.max_num_prefill_tokens or settings.max_num_prefill_tokens,
            block_size=facts.block_size,
            prefix_caching=settings.prefix_caching,
            num_swap_blocks=facts.num_swap_blocks,
            kv_offload=settings.kv_offload,
            policy=settings.policy,
            preemption=settings.preemption,
            max_step_s=settings.max_step_ms / 1000 or UNLIMITED,
            long_prompt_tokens=settings.long_prompt_tokens or MAX_TOKENS,
            prompt_max_slowdown=settings.prompt_max_slowdown or UNLIMITED,
            encode_max_slowdown=settings.encode_max_slowdown,
            long_prompt_max_slowdown=settings.long_prompt_max_slowdown,
            hidden_size=facts.hidden_size,
            kv_groups=tuple(facts.kv_groups) or (FULL,),
            num_speculative_tokens=facts.num_speculative_tokens,
            max_num_drafts=facts.max_num_drafts,
            adaptive_speculation=speculative.adaptive,
            eos_ids=tuple(facts.eos_ids),
            max_num_top=facts.max_num_top,
            max_loras=max_loras,
            num_stages=num_stages,
            waits_for_adapters=max_loras > 0,
            states=StateConfig.of(facts),
            generates=facts.generates,
            block_bytes=facts.block_bytes,
            slot_bytes=facts.slot_bytes,
            num_encoder_rows=facts.num_encoder_rows,
            max_whole_run=facts.max_whole_run,
            sleep_cache_bytes=sleep_cache_bytes,
        )
        return config.of_encoder(settings.encoder_step_tokens) if facts.is_encoder else config
