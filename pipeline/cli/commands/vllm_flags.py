"""vLLM's options of `pipeline serve`: those that set one of Pipeline's settings, and those that are refused with the
reason."""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.config.sections.requests import MAX_LOGPROBS

AS_SETTINGS = {
    "--allow-credentials": "gateway.allow_credentials=true",
    "--allowed-headers": "gateway.allowed_headers=LIST",
    "--allowed-methods": "gateway.allowed_methods=LIST",
    "--allowed-origins": "gateway.allowed_origins=LIST",
    "--api-server-count": "gateway.replicas=N",
    "--async-scheduling": "schedule.max_steps_in_flight=2",
    "--device": "execute.device=NAME",
    "--disable-hybrid-kv-cache-manager": "execute.kv_groups=false",
    "--download-dir": "cache_dir=FOLDER",
    "--dtype": "execute.dtype=NAME",
    "--enable-per-request-metrics": "gateway.per_request_metrics=true",
    "--enable-prefix-caching": "schedule.prefix_caching=true",
    "--generation-config": "generation_config=FOLDER",
    "--gpu-memory-utilization": "execute.gpu_memory_utilization=SHARE",
    "--kv-cache-dtype": "execute.kv_dtype=NAME",
    "--kv-cache-memory-bytes": "execute.kv_cache_bytes=BYTES",
    "--kv-offloading-size": "execute.swap_bytes=BYTES",
    "--long-prefill-token-threshold": "schedule.long_prompt_tokens=N",
    "--lora-modules": "lora.adapters=MODULES",
    "--max-cpu-loras": "lora.max_cpu_loras=N",
    "--max-logprobs": "limits.max_logprobs=N",
    "--max-lora-rank": "lora.max_lora_rank=N",
    "--max-loras": "lora.max_loras=N",
    "--max-model-len": "max_model_len=N",
    "--max-num-batched-tokens": "schedule.max_num_batched_tokens=N",
    "--max-num-seqs": "schedule.max_num_seqs=N",
    "--no-async-scheduling": "schedule.max_steps_in_flight=1",
    "--no-enable-prefix-caching": "schedule.prefix_caching=false",
    "--quantization": "quantization=NAME",
    "--reasoning-parser": "chat.reasoning_parser=NAME",
    "--scheduling-policy": "schedule.policy=NAME",
    "--served-model-name": "served_model_name=NAME",
    "--ssl-ca-certs": "gateway.ssl_ca_certs=FILE",
    "--ssl-certfile": "gateway.ssl_certfile=FILE",
    "--ssl-keyfile": "gateway.ssl_keyfile=FILE",
    "--pipeline-parallel-size": "execute.pipeline_parallel=N",
    "--pp": "execute.pipeline_parallel=N",
    "--swap-space": "execute.swap_bytes=BYTES",
    "--tensor-parallel-size": "execute.tensor_parallel=N",
    "--tool-call-parser": "chat.tool_call_parser=NAME",
    "--tp": "execute.tensor_parallel=N",
    "--uvicorn-log-level": "log_level=NAME",
}
"""In the form that `--set` takes; a value in capitals is the option's argument. docs/http.md has the same table."""


class Refused(NamedTuple):
    """An option that has no meaning here."""

    advice: str
    """What to do instead."""
    neutral: tuple[str, ...] = ()
    """Arguments that change nothing, so they are accepted."""


_ONE_DEVICE = "leave it out, and start several servers for more throughput"
_NO_REQUEST_LOG = "leave it out: requests are only logged with --set log_level=debug"
_CHUNKED = "prompts are always computed in chunks of at most --max-num-batched-tokens; leave it out"
REFUSED = {
    "--block-size": Refused("a KV block always has 16 tokens; leave it out", ("16",)),
    "--chat-template": Refused("put the template into the model's folder, as chat_template.jinja"),
    "--compilation-config": Refused("leave it out: there is nothing to compile"),
    "--cpu-offload-gb": Refused("weights can't be offloaded; leave it out, or use --quantization", ("0",)),
    "--data-parallel-size": Refused(_ONE_DEVICE, ("1",)),
    "--disable-log-requests": Refused(_NO_REQUEST_LOG),
    "--disable-log-stats": Refused("leave it out: stats are not logged, but served at /metrics"),
    "--disable-uvicorn-access-log": Refused(_NO_REQUEST_LOG),
    "--enable-auto-tool-choice": Refused("leave it out: tool_choice 'auto' always works"),
    "--enable-chunked-prefill": Refused(_CHUNKED),
    "--enable-log-requests": Refused("use --set log_level=debug"),
    "--enable-ssl-refresh": Refused("leave it out, and restart the server to read new certificates"),
    "--enforce-eager": Refused("leave it out: a CPU uses no CUDA graphs, and a GPU always does"),
    "--limit-mm-per-prompt": Refused("leave it out: images and audio are not supported"),
    "--load-format": Refused("leave it out: the format is read from the model's files", ("auto",)),
    "--no-enable-chunked-prefill": Refused(_CHUNKED),
    "--no-enable-log-requests": Refused(_NO_REQUEST_LOG),
    "--override-generation-config": Refused("set the sampling parameters in each request"),
    "--revision": Refused("write it behind the model: ORG/NAME@REVISION"),
    "--root-path": Refused("let the proxy remove the prefix from the path"),
    "--seed": Refused("set `seed` in each request: a request without one gets a random seed", ("0",)),
    "--speculative-config": Refused(
        "use --set speculative.method=ngram, draft_model or eagle, with speculative.draft=MODEL, "
        "speculative.num_speculative_tokens, speculative.prompt_lookup_max and speculative.prompt_lookup_min"
    ),
    "--ssl-cert-reqs": Refused("use --ssl-ca-certs: with it, clients need a certificate"),
    "--tokenizer": Refused("the tokenizer is read from the model's folder; leave it out"),
    "--tokenizer-mode": Refused("leave it out: the model's own tokenizer is used", ("auto",)),
    "--trust-remote-code": Refused("leave it out: no code of a checkpoint is ever run"),
}

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_OWN_NAMES = {
    "--dtype": {"auto": "bfloat16", "float": "float32"},
    "--generation-config": {"vllm": "none"},
    "--kv-cache-dtype": {"int8_per_token_head": "int8"},
    "--max-model-len": {"-1": "0", "auto": "0"},
    "--tool-call-parser": {"llama3_json": "llama3", "llama4_json": "llama3"},
}
"""Values that have another name here."""
_DEST = "vllm "
ONE_NAME = "--served-model-name takes one name"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the options. `given` returns what they set."""
    group = parser.add_argument_group(
        "options of vLLM", "each sets one of the settings; the others are refused by name"
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="an API key that clients need; can be repeated. Better: gateway.api_keys_file or PIPELINE_API_KEYS, which "
        "other users of this machine can't see",
    )
    for flag, setting in AS_SETTINGS.items():
        key, _, value = setting.partition("=")
        if not value.isupper():
            group.add_argument(flag, dest=_DEST + flag, action="store_const", const=value, help=f"{key} = {value}")
        else:
            convert = _converter(flag, value)
            several = "+" if value == "MODULES" else None
            group.add_argument(flag, dest=_DEST + flag, type=convert, metavar=value, help=key, nargs=several)
    group.add_argument(
        "--enable-lora", action="store_true", help="no setting: --lora-modules and lora.* enable adapters"
    )
    for flag, refused in REFUSED.items():
        num_args = 1 if refused.neutral else "*"
        group.add_argument(flag, action=_Refuse, nargs=num_args, default=None, help=argparse.SUPPRESS)


def given(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The settings that the options give: how the user wrote each, and KEY=VALUE."""
    found = []
    for flag, setting in AS_SETTINGS.items():
        if (argument := getattr(args, _DEST + flag, None)) is not None:
            value = "{" + ", ".join(argument) + "}" if isinstance(argument, list) else argument
            key, _, form = setting.partition("=")
            found.append((f"{flag} {value}" if form.isupper() else flag, f"{key}={value}"))
    return found


def dashed(words: Sequence[str]) -> list[str]:
    """The words of a command line with vLLM's other spelling of options, `--max_model_len`, replaced."""
    return [_dashed(word) if word.startswith("--") else word for word in words]


def hint(words: Iterable[str], line: Sequence[str] = ()) -> str:
    """A hint for unknown words of a command `line` that vLLM takes; empty for others."""
    words = list(words)
    if is_second_name(words, line):
        return f"; {ONE_NAME}"
    names = [_dashed(word).partition("=")[0] for word in words if word.startswith("--")]
    settings = dict.fromkeys(AS_SETTINGS[name] for name in names if name in AS_SETTINGS)
    return f"; did you mean {' '.join(f'--set {setting}' for setting in settings)}?" if settings else ""


def is_second_name(words: Sequence[str], line: Sequence[str]) -> bool:
    """Whether one of these words is a second name after --served-model-name, of which vLLM takes several."""
    flag = "--served-model-name"
    places = [place + (word == flag) for place, word in enumerate(line) if word == flag or word.startswith(f"{flag}=")]
    return any(word in words for place in places for word in line[place + 1 : place + 2])


def gpu_memory_share(args: argparse.Namespace) -> float | None:
    """The value of --gpu-memory-utilization; None if it is not given. A warning about settings without effect passes
    over values that are the default."""
    given = getattr(args, f"{_DEST}--gpu-memory-utilization", None)
    return None if given is None else float(given)


def gives_name(args: argparse.Namespace) -> bool:
    """Whether --served-model-name is given."""
    return getattr(args, f"{_DEST}--served-model-name", None) is not None


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


class _Refuse(argparse.Action):
    """Reports an option that has no meaning here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        refused = REFUSED[option_string]
        if not (values and set(values) <= set(refused.neutral)):
            parser.error(f"{option_string} of vLLM is not supported: {refused.advice}")


def _converter(flag: str, form: str) -> Callable[[str], str]:
    """Converts an option's argument to the value of its setting. Raises ArgumentTypeError."""

    def convert(text: str) -> str:
        text = _OWN_NAMES.get(flag, {}).get(text, text)
        if flag == "--dtype" and text in ("half", "float16"):
            raise argparse.ArgumentTypeError(f"{text} is not supported: use bfloat16 or float32")
        if flag == "--kv-cache-dtype" and text not in ("auto", "int8"):
            raise argparse.ArgumentTypeError(
                f"{text} is not supported: use int8, which takes as little memory as fp8 and has a scale for each "
                "token and head, or auto, the type of --dtype"
            )
        if flag == "--max-logprobs" and text == "-1":
            raise argparse.ArgumentTypeError(f"-1, vLLM's 'no limit', is not supported: use 0 to {MAX_LOGPROBS}")
        if form == "MODULES":
            return _module(text)
        if flag in ("--swap-space", "--kv-offloading-size"):  # in GiB
            return str(_count(f"{text}G"))
        return str(_count(text)) if form in ("N", "BYTES") else text

    return convert


def _module(text: str) -> str:
    """An entry of lora.adapters, in TOML, of vLLM's NAME=PATH or {"name": NAME, "path": PATH}. Raises
    ArgumentTypeError."""
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        try:
            given = msgspec.json.decode(text, type=dict[str, str | None])
        except msgspec.DecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not JSON with a name and a path") from error
        name, path, equals = given.get("name") or "", given.get("path") or "", "="
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"needs NAME=PATH, got {text!r}")
    return f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(path, ensure_ascii=False)}"


def _count(text: str) -> int:
    """A number such as 4096, 4k (4000) or 4K (4096). Raises ArgumentTypeError."""
    if (match := _COUNT.fullmatch(text)) is None:
        raise argparse.ArgumentTypeError(f"needs a number such as 4096 or 4K, got {text!r}")
    return round(float(match[1]) * _FACTORS[match[2]])
