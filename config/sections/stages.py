"""Settings of the stages behind the gateway."""

from typing import Annotated, Literal

from msgspec import Meta

from pipeline.config.sections.base import MAX_BYTES, MAX_TOKENS, Frozen, Replicas, Seconds


class IngestSettings(Frozen, frozen=True):
    """The process that validates, applies the chat template and tokenizes."""

    replicas: Replicas = 1
    arena_bytes: Annotated[
        int,
        Meta(
            ge=65536, le=MAX_BYTES, description="Shared memory for prompt ids on their way to the scheduler, in bytes."
        ),
    ] = 16 * 1024**2


PolicyName = Literal["fcfs", "priority", "longest-prefix-match"]


ENCODER_STEP_TOKENS = 512
"""Larger steps gain nothing (docs/performance.md), and texts that come meanwhile wait for the whole step."""


class ScheduleSettings(Frozen, frozen=True):
    """The process that decides what the next step computes."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of running sequences.")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=16, le=2**20, description="Maximum number of tokens in one step.")
    ] = 192
    max_num_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="Maximum number of tokens in a step in which no sequence decodes. No client waits for its next "
            "token then, and longer chunks read the weights fewer times. 0 is 384 for float weights on a CPU "
            "with AMX, and else max_num_batched_tokens; no value makes it less than that.",
        ),
    ] = 0
    block_size: Annotated[Literal[16], Meta(description="Number of tokens in one KV block.")] = 16
    prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of prompts with a common prefix.")] = True
    max_steps_in_flight: Annotated[
        Literal[0, 1, 2, 3, 4, "auto"],
        Meta(
            description="Maximum number of steps in flight: 1 waits for each result, 2 to 4 plan ahead while a step "
            'runs, "auto" measures whether 1 or 2 is faster (on a GPU 2 or 3), and 0 is 1 on this machine\'s '
            "CPU, and 2 on a GPU or if Ray starts the executor. With execute.pipeline_parallel, 0 is the number of "
            "stages."
        ),
    ] = 0
    policy: Annotated[
        PolicyName,
        Meta(
            description='Order of waiting requests: "fcfs" is first come, first served; "priority" puts the lowest '
            '"priority" value first; "longest-prefix-match" puts the prompt with the longest prefix in '
            "the cache first."
        ),
    ] = "fcfs"
    preemption: Annotated[
        Literal["auto", "swap", "recompute"],
        Meta(
            description='What happens to the KV blocks of a preempted sequence: "swap" copies them to '
            'execute.swap_bytes and back, "recompute" drops them and computes them again, "auto" chooses '
            "what has taken less time so far."
        ),
    ] = "auto"
    kv_offload: Annotated[
        bool,
        Meta(
            description="Copy full KV blocks to execute.swap_bytes as soon as they are computed. They are found there "
            "when the KV cache has evicted them, or when the executor has died, and copied back instead of "
            "computed again."
        ),
    ] = True
    max_step_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Maximum duration of a step in which sequences decode, predicted from earlier steps. Prompt "
            "chunks are shortened to fit, to 16 tokens at least. 0 is unlimited.",
        ),
    ] = 0.0
    prompt_max_slowdown: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="Maximum duration of a step with parts of prompts, as a multiple of its duration without them, "
            "predicted from earlier steps. Where fewer than 8 sequences decode and many prompts wait, the prompts "
            "get their share of the time by number, if that is more. 0 is unlimited.",
        ),
    ] = 2.5
    encode_max_slowdown: Annotated[
        float,
        Meta(
            ge=1.01,
            le=1000,
            description="Maximum duration of a step with a part of the encoding of an image, as a multiple of its "
            "duration without it, on average, while sequences decode. Less keeps streams fast; more answers images "
            "sooner: at 1.1, they are encoded with a share of 1/11 of the time.",
        ),
    ] = 1.1
    long_prompt_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_TOKENS,
            description="Prompts with more uncomputed tokens than this are long: they wait for shorter ones, and "
            "long_prompt_max_slowdown limits how much they slow down a step in which others decode. 0: "
            "no prompt is long.",
        ),
    ] = 1024
    long_prompt_max_slowdown: Annotated[
        float,
        Meta(
            ge=1.1,
            le=1000,
            description="Maximum duration of a step with a part of a long prompt, as a multiple of its duration "
            "without it, predicted from earlier steps.",
        ),
    ] = 2.0
    arena_bytes: Annotated[
        int,
        Meta(
            ge=65536, le=MAX_BYTES, description="Shared memory for step arrays on their way to the executor, in bytes."
        ),
    ] = 16 * 1024**2

    @property
    def max_step_tokens(self) -> int:
        """The most tokens that any step has."""
        return max(self.max_num_batched_tokens, self.max_num_prefill_tokens)

    @property
    def encoder_step_tokens(self) -> int:
        """The most tokens of a step of an encoder, if it has more than one text."""
        return max(ENCODER_STEP_TOKENS, self.max_step_tokens)


class ExecuteSettings(Frozen, frozen=True):
    """The process that computes a step: forward pass and sampling."""

    device: Annotated[
        Literal["cpu", "cuda"], Meta(description='Where the model runs; "cuda" is one NVIDIA GPU, Ampere or newer.')
    ] = "cpu"
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        Meta(description="Precision of unquantized weights, and of the KV cache unless execute.kv_dtype is set."),
    ] = "bfloat16"
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        Meta(
            description='Precision of the KV cache. "auto" is execute.dtype. "int8" stores 8 bits per number and a '
            "scale for each token and head. It takes about half the memory, and changes about 2 % of the most likely "
            "tokens of a small model."
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "neon", "portable", "torch"],
        Meta(
            description="Kernels of the model: our own for an instruction set (compiled at the first start), or "
            'torch; "auto" takes the fastest that this machine and the dtype support.'
        ),
    ] = "auto"
    activations: Annotated[
        Literal["auto", "int12", "int8"],
        Meta(
            description='Precision of activations for weights of 4 to 6 bits on a CPU. "int12" gives the results of '
            'the weights (before K-quants it has 16 bits, except on a CPU with AMX). "int8" is up to twice as fast '
            "with several requests and in prompts, except on a CPU with AMX, and changes about 3 % of the most likely "
            'tokens of a small model, 1.5 % with 1.5B weights. "auto" is int8 if most weights have at most 5 bits, '
            "which are rounded more coarsely than that, and take 200 MB or more; and int12 for small models, for a "
            "file of Q6_K and on a CPU with AMX."
        ),
    ] = "auto"
    keep_packed_weights: Annotated[
        bool,
        Meta(
            description="On a CPU, cache the packed weights (in the order in which the kernels read them) on disk, "
            "beside the prepared model. The first start writes the file in the background. Later starts map it, and "
            "servers of one model share its memory. It takes as much disk space as the weights."
        ),
    ] = True
    kv_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="Memory for KV blocks in bytes. 0 is 512 MiB on a CPU, and on a GPU what "
            "execute.gpu_memory_utilization leaves.",
        ),
    ] = 0
    hybrid_kv_cache_manager: Annotated[
        bool,
        Meta(
            description="Free the KV blocks that a layer's sliding window has left, if the model has such layers: more "
            "sequences fit into the same memory. false keeps all blocks of a running sequence."
        ),
    ] = True
    programmatic_dependent_launch: Annotated[
        bool,
        Meta(
            description="On a GPU of compute capability 9.0 (Hopper) or newer, let each kernel of a step with few rows "
            "start before the previous one ends (programmatic dependent launch), if the model has small matrices and "
            "is not quantized."
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the GPU's memory for weights, activations, graphs and KV blocks together, if "
            "execute.kv_cache_bytes is 0.",
        ),
    ] = 0.9
    swap_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="Shared memory for the KV blocks of preempted sequences, in bytes; 0 recomputes them.",
        ),
    ] = 0
    swap_dir: Annotated[
        str,
        Meta(
            description="Folder for the KV blocks of open requests while the server sleeps (POST /sleep). Empty: they "
            "are in memory. The files have no names, so nothing is left when the server ends."
        ),
    ] = ""
    sleep_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="How much of the prefix cache is kept while the server sleeps, in bytes of each rank, beside "
            "the KV blocks of open requests.",
        ),
    ] = 256 * 1024**2
    num_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Number of threads that compute a step; 0 is one per core. With tensor_parallel, that of each "
            "rank; 0 is an equal part of the cores. The stages of a pipeline share the cores.",
        ),
    ] = 0
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of ranks: processes that compute each step together, each with a part of every matrix "
            "and of the KV cache. On a CPU, results are the same as with 1; GPUs have a rank each. kv_cache_bytes, "
            "swap_bytes and num_threads are those of each rank.",
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=15,
            description="Number of stages of a pipeline: each has a part of the layers, and tensor_parallel ranks of "
            "its own. As many steps are computed at once. Results are the same as with 1. Only on a CPU.",
        ),
    ] = 1
    pipeline_layers: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(
            description="Number of layers of each stage of the pipeline, such as [19, 11]. Empty: so that all stages "
            "read about as many bytes of weights; the last one also reads the head's."
        ),
    ] = ()
    launcher: Annotated[
        Literal["process", "ray"],
        Meta(
            description='Where the executor runs: "process" is this machine, beside the other stages; "ray" is a host '
            "that Ray chooses (see the sections ray and transport)."
        ),
    ] = "process"
    cores: Annotated[
        tuple[str, ...],
        Meta(
            description='The cores that each rank may use, such as "0-7,16-23": an entry for each rank, for example '
            "the cores of a NUMA node. Empty: all ranks may use all cores."
        ),
    ] = ()
    all_reduce: Annotated[
        Literal["nccl", "one_shot"],
        Meta(
            description="How GPUs add what they have computed: with NCCL, or in steps of few tokens with our own "
            "kernel, which reads the other GPUs' memory. It has not run on GPUs yet."
        ),
    ] = "nccl"
    barrier_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Restart all ranks when one of them has kept the others waiting for this long within a step. "
            "The log names it, and what it had not computed."
        ),
    ] = 10.0
    arena_bytes: Annotated[
        int,
        Meta(ge=65536, le=MAX_BYTES, description="Shared memory for step results on their way back, in bytes."),
    ] = 4 * 1024**2
    encoder_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="Memory for the rows of embeddings that a model makes of images, in bytes. Each image must fit "
            "into it. With 0, images are refused, and the model's vision tower is not loaded. Only on CPUs, and only "
            "for models with a vision tower.",
        ),
    ] = 256 * 1024**2

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return self.tensor_parallel * self.pipeline_parallel


class DetokenizeSettings(Frozen, frozen=True):
    """The process that turns ids into text and finds stop strings."""

    replicas: Replicas = 1
