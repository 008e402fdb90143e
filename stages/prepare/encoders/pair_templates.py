"""Which chat templates make a prompt of a query and a document, for rerankers that are decoders.

A template gets messages of the roles `query` and `document`, and an instruction as a `system` message and as the
variable `instruction`, as in sentence-transformers and vLLM. Ingest renders it, and takes the first one that writes
both texts (stages/ingest/templates/pair_template.py).

    the setting chat_template          the user's, which counts alone
    the model's own chat template      if it names both roles, or if sentence-transformers' files have inputs as chats
    tokenizer.chat_template.rerank     of a .gguf file
    Qwen3-Reranker's                   if the files say that it is one: its own chat template is that of Qwen3
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import PairTemplates
from pipeline.stages.prepare.encoders.pooler import PreparedPooler
from pipeline.stages.prepare.encoders.sentence_transformers import Modules
from pipeline.stages.prepare.files import MAX_TEMPLATE_BYTES
from pipeline.stages.prepare.sources.source import ModelError

CHAT = "chat_template.jinja"
OWN = "pair_template.jinja"
"""A template in the prepared folder that is for pairs alone."""

ORIGINAL = "is_original_qwen3_reranker"
"""vLLM's key. Here it is enough to say so, also if the LM head was converted to that of a classifier."""
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3 = (
    f"{_HEAD}<Instruct>: {{{{ instruction or '{DEFAULT_INSTRUCTION}' }}}}\n<Query>: {{{{ query }}}}\n"
    f"<Document>: {{{{ document }}}}{_END}\n"
)
"""As on Qwen3-Reranker's model card. Of a template's last line breaks, one is not written."""
YES_NO = ("yes", "no")
RERANK_KEY = "tokenizer.chat_template.rerank"
_RERANK_OF_QWEN3 = f"{_HEAD}<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}{_END}"
"""What llama.cpp's converter writes for Qwen3-Reranker."""


def add_to_folder(
    pooler: PreparedPooler | None,
    model: ModelConfig,
    config: Mapping[str, Any],
    chat_template: str | None,
    modules: Modules | None,
    tokenizer: Tokenizer,
    score_tokens: tuple[int, int] | None,
    target: Path,
) -> tuple[PreparedPooler | None, list[str]]:
    """The pooler of a folder with its templates of pairs, one of which may be written to `target`; and lines about
    pairs that have none. `chat_template` is the model's own, `score_tokens` are the ids of the true and the false token
    of vLLM's key."""
    if pooler is None or "score" not in pooler.pooler.tasks:
        return pooler, []
    files = []
    if chat_template is not None and (_names_roles(chat_template) or (modules is not None and modules.pairs_are_chats)):
        files.append(CHAT)
    if modules is not None and modules.score is not None:
        score_tokens = modules.score.true_id, -1 if modules.score.false_id is None else modules.score.false_id
    names = () if score_tokens is None else tuple(map(tokenizer.id_to_token, (max(one, 0) for one in score_tokens)))
    if config.get(ORIGINAL) is True or (model.architecture == "qwen3" and names == YES_NO):
        _write(QWEN3, target)
        files.append(OWN)
    if files:
        variables = "" if modules is None else modules.pair_variables
        return _with(pooler, PairTemplates(files=files, variables=variables)), []
    if not model.causal:
        return pooler, []
    return pooler, [
        "pairs of texts are joined without a template, as no chat template names the roles 'query' and 'document': "
        "set chat_template if the model needs one"
    ]


def add_to_gguf(
    pooler: PreparedPooler, architecture: str, rerank: str | None, labels: list[str] | None, target: Path
) -> PreparedPooler:
    """The pooler of a .gguf file with its template of pairs, which is written to `target`. `rerank` is the file's own,
    in which `{query}` and `{document}` stand for the texts. Raises ModelError."""
    if "score" not in pooler.pooler.tasks:
        return pooler
    is_qwen3 = architecture == "qwen3" and labels is not None and tuple(labels) == YES_NO
    if rerank is None and not is_qwen3:
        return pooler
    _write(QWEN3 if rerank in (None, _RERANK_OF_QWEN3) else _as_jinja(rerank or ""), target)
    return _with(pooler, PairTemplates(files=[OWN]))


def _with(pooler: PreparedPooler, pairs: PairTemplates) -> PreparedPooler:
    return PreparedPooler(msgspec.structs.replace(pooler.pooler, pairs=pairs), pooler.tensors, pooler.used)


def with_given(config: ModelConfig) -> ModelConfig:
    """The config of a prepared folder whose chat template is that of the setting."""
    pooler = config.pooler
    if pooler is None or "score" not in pooler.tasks:
        return config
    variables = "" if pooler.pairs is None else pooler.pairs.variables
    given = PairTemplates(files=[CHAT], variables=variables, adds_special_tokens=True)
    return msgspec.structs.replace(config, pooler=msgspec.structs.replace(pooler, pairs=given))


def _names_roles(template: str) -> bool:
    """Whether a template's source has the names of both roles in quotes. Others than these are mostly left from the
    model that a reranker was made of."""
    return all(f'"{role}"' in template or f"'{role}'" in template for role in ("query", "document"))


def _as_jinja(rerank: str) -> str:
    """llama.cpp's form of a template as Jinja: everything but the two places is text."""
    texts = rerank.replace("{document}", "{query}\0").split("{query}")
    pieces = [f"{{{{ {msgspec.json.encode(texts[0]).decode()} }}}}"]
    for text in texts[1:]:
        name = "document" if text.startswith("\0") else "query"
        pieces.append(f"{{{{ {name} }}}}{{{{ {msgspec.json.encode(text.removeprefix(chr(0))).decode()} }}}}")
    return "".join(pieces)


def _write(template: str, target: Path) -> None:
    data = template.encode()
    if len(data) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{RERANK_KEY} has {len(data)} bytes; at most {MAX_TEMPLATE_BYTES} are allowed")
    (target / OWN).write_bytes(data)
