"""What a newcomer may type who knows Ollama, llama.cpp or only the settings, and what does it here."""

import re
from collections.abc import Collection, Iterable

COMMANDS = {
    **dict.fromkeys(("run", "generate"), "use `pipeline chat MODEL`, or `pipeline serve MODEL` for a server"),
    **dict.fromkeys(("start", "server", "up", "launch"), "use `pipeline serve MODEL`"),
    **dict.fromkeys(("download", "fetch", "create"), "use `pipeline pull MODEL`"),
    **dict.fromkeys(("list", "ls", "show", "search"), "use `pipeline models`"),
    **dict.fromkeys(("rm", "remove", "delete"), "use `pipeline cache rm NAME`"),
    **dict.fromkeys(("kill", "shutdown", "down", "quit"), "use `pipeline stop`"),
    **dict.fromkeys(("status", "health", "info"), "use `pipeline ps`"),
    "check": "use `pipeline check-model MODEL` or `pipeline config check FILE`",
    "help": "use `pipeline --help`",
    "version": "use `pipeline --version`",
}
"""Commands of other tools, and what to do instead."""

_IN_REQUESTS = "set it in each request"
_NOT_NEEDED = "leave it out"
_CONTEXT, _SEQUENCES, _GPU = "use --max-model-len N", "use --max-num-seqs N", "use --config gpu, which takes all layers"
_THREADS, _KV_TYPE = "use --set execute.num_threads=N", "use --kv-cache-dtype int8"
LLAMA_CPP = {
    **dict.fromkeys(("-m", "-hf", "-hfr", "--hf-repo", "--hf-file", "--model-path"), "use --model MODEL"),
    **dict.fromkeys(("-c", "--ctx-size", "--context-length", "--num-ctx", "--n-ctx"), _CONTEXT),
    **dict.fromkeys(("-t", "--threads", "-tb", "--threads-batch"), _THREADS),
    **dict.fromkeys(("-np", "--parallel"), _SEQUENCES),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), _GPU),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), "use --max-num-batched-tokens N"),
    **dict.fromkeys(("-a", "--alias"), "use --served-model-name NAME"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), _KV_TYPE),
    **dict.fromkeys(("-v", "--verbose", "--log-verbose"), "use --set log_level=debug"),
    **dict.fromkeys(("-md", "--model-draft"), "use --set speculative.method=draft_model --set speculative.draft=MODEL"),
    **dict.fromkeys(("-n", "--predict", "--n-predict"), "set max_tokens in each request"),
    **dict.fromkeys(("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--grammar"), _IN_REQUESTS),
    **dict.fromkeys(("-fa", "--flash-attn", "-cb", "--cont-batching", "--jinja", "--mlock", "--no-mmap"), _NOT_NEEDED),
    **dict.fromkeys(("--metrics", "--props", "--slots", "--embedding", "--embeddings"), f"{_NOT_NEEDED}: it is on"),
    "--chat-template-file": "use --chat-template FILE",
    "--lora": "use --lora-modules NAME=PATH",
    "--api-key-file": "use --set gateway.api_keys_file=FILE",
    "--ssl-cert-file": "use --ssl-certfile FILE",
    "--ssl-key-file": "use --ssl-keyfile FILE",
}
"""Options of llama-server, some with Ollama's name of the same, and what to do instead."""


def advice_for_command(word: str) -> str:
    """What to type instead of another tool's command, as the rest of a sentence; empty for other words."""
    return f"; {COMMANDS[word]}" if word in COMMANDS else ""


def advice_for_options(words: Iterable[str], known: Collection[str]) -> str:
    """What to use instead of unknown options: llama.cpp's, or a setting's name written as an option, if the command
    knows it. The rest of a sentence; empty if there is none for any."""
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("-"))
    found = {name: advice for name in names if (advice := LLAMA_CPP.get(name) or _setting(name))}
    found = {name: advice for name, advice in found.items() if _helps(advice, known)}
    if len(names) == 1:
        return "".join(f"; {advice}" for advice in found.values())
    return "".join(f"; {name}: {advice}" for name, advice in found.items())


def _helps(advice: str, known: Collection[str]) -> bool:
    """Whether a command has the options; one without --port neither listens nor connects."""
    named = re.findall(r"(?<!\w)--[a-z-]+", advice)
    return set(named) <= set(known) and ("--port" in known or "--set gateway." not in advice)


def _setting(option: str) -> str:
    """`--cache-dir` is the setting cache_dir, and `--num-threads` execute.num_threads."""
    if not option.startswith("--"):
        return ""
    from pipeline.config.keys import sections

    word = option.removeprefix("--").replace("-", "_")
    dotted = [key.dotted for section in sections() for key in section.keys if word in (key.dotted, key.name)]
    return f"use {' or '.join(f'--set {name}=VALUE' for name in dotted)}" if dotted else ""
