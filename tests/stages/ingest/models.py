"""Tiny prepared folders: a byte-level vocabulary, or a test's own tokenizer and template."""

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pipeline.config.settings import LimitSettings
from pipeline.runtime import messages as m
from pipeline.runtime.messages import ExecuteFacts
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One id per byte, 0..255 in the order of the byte-level alphabet, then <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return tokenizer


def facts(max_model_len: int = 64, vocab_size: int = 258) -> ExecuteFacts:
    return ExecuteFacts(num_blocks=64, block_size=16, max_model_len=max_model_len, vocab_size=vocab_size)


def folder(path: Path, template: str | None = CHATML, tokenizer: Tokenizer | None = None) -> Path:
    """A prepared folder without weights."""
    (tokenizer or byte_tokenizer()).save(str(path / "tokenizer.json"))
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    ModelConfig(
        name="tiny",
        architecture="llama",
        num_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=258,
        max_position=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_embeddings=True,
        eos_ids=[257],
        bos_id=256,
        weight_files=[],
    ).save(path)
    return path


def prompts(tokenizer: Tokenizer, of: ExecuteFacts, templates: ChatTemplates | None = None) -> PromptProcessor:
    """For a model without a template, or with some."""
    return PromptProcessor(tokenizer, of, templates or ChatTemplates({}, "no template", 1.0), LimitSettings())


def submit(
    prompt: m.Prompt | str,
    *,
    request_id: int = 1,
    attempt: int = 0,
    **options: Any,
) -> m.Submit:
    """A request, with a text prompt if `prompt` is a string. `options` are fields of `GenerationOptions`."""
    return m.Submit(
        request_id=request_id,
        attempt=attempt,
        gateway=0,
        arrival_s=5.0,
        prompt=m.TextPrompt(prompt) if isinstance(prompt, str) else prompt,
        options=m.GenerationOptions(**{"n": 2, "seed": 7, "stop": ["x"], **options}),
    )


def options_of(admit: m.Admit) -> m.GenerationOptions:
    """The options that schedule gets."""
    return msgspec.msgpack.decode(admit.options, type=m.GenerationOptions)


def chat(*contents: str, role: str = "user") -> m.ChatPrompt:
    return m.ChatPrompt([m.ChatMessage(role, content) for content in contents])


PANICS = "a" * 34 + "!"
"""35 bytes that `panicking_tokenizer` cannot split."""


def panicking_tokenizer() -> Tokenizer:
    """`byte_tokenizer` with a pre-tokenizer regex that backtracks endlessly: the library panics when it gives up."""
    tokenizer = byte_tokenizer()
    split = pre_tokenizers.Split(Regex("(a+)+$"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


def panic() -> None:
    """A text that makes tokenizers panic."""
    panicking_tokenizer().encode_batch_fast([PANICS])


def with_id(tokenizer: Tokenizer, token: str, token_id: int) -> str:
    """The text of its tokenizer.json, with another id for one token."""
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"][token] = token_id
    return json.dumps(state)
