"""Cases for pairs of texts: joined by the tokenizer, or by a reranker's template."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from pipeline.runtime import messages as m
from pipeline.stages.ingest.prompts.content_specials import ContentSpecials
from pipeline.stages.ingest.prompts.pooled_prompts import Pairs, PooledPrompts
from pipeline.stages.ingest.prompts.prompt_checks import PromptChecks
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.stages.ingest.templates.pair_template import PairTemplate
from pipeline.stages.ingest.templates.template import ChatTemplate
from tools.scaling_meter.case import MAX_BODY, Case
from tools.scaling_meter.texts import PIECES, Grow, repeated

MAX_LEN = 512
NUM_DOCUMENTS = 16
MAX_BYTES = 256 * 1024
THREAD_MS = 2000.0
"""In a thread, with a template's text for each of the documents."""
POOLED = m.GenerationOptions(max_tokens=1, pooling=m.Pooling.CLS)
CUT = m.PromptOptions(truncate=-1, truncates_right=True)
SPECIALS = ["[CLS]", "[SEP]", "<|im_start|>", "<|im_end|>"]
QWEN3 = (
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: {{ instruction or 'Find.' }}\n"
    "<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATES: Mapping[str, str] = {
    "variables": QWEN3,
    "messages": "{% for one in messages %}{{ one.role }}: {{ one.content | trim }}\n{% endfor %}<|im_end|>",
}
Texts = Callable[[int], tuple[str, list[str]]]
"""A query and documents of about n bytes"""


def cases() -> Iterator[Case]:
    for name, texts in _texts().items():
        for kind, source in {"tokenizer": None, **TEMPLATES}.items():
            for options in ("whole", "cut"):
                make = functools.partial(_pairs, source, texts, CUT if options == "cut" else m.PromptOptions())
                yield Case("query and documents", f"{kind}, {options}: {name}", make, MAX_BYTES, THREAD_MS)


def _texts() -> dict[str, Texts]:
    grows = {repr(piece): repeated(piece) for piece in ("a ", *PIECES, "<|im_end|>", "<|im_")}
    both = {f"both {name}": functools.partial(_both, grow) for name, grow in grows.items()}
    long = {"long query": lambda n: ("a " * (n // 2), ["a"] * NUM_DOCUMENTS)}
    return both | long | {"long documents": lambda n: ("a", ["a " * (n // 2 // NUM_DOCUMENTS)] * NUM_DOCUMENTS)}


def _both(grow: Grow, n: int) -> tuple[str, list[str]]:
    return grow(n // 2), [grow(n // 2)]


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    cls, sep = (text for text in SPECIALS[:2])
    ids = [(text, tokenizer.token_to_id(text)) for text in (cls, sep)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=ids
    )
    return tokenizer


def _prompts(source: str | None) -> PooledPrompts:
    template = None if source is None else Pairs(PairTemplate(ChatTemplate(source), 1.0), False)
    return PooledPrompts(
        _tokenizer(),
        PromptChecks(MAX_LEN, 64, None, MAX_BODY, generates=False),
        ContentSpecials(_tokenizer()),
        template,
        has_token_types=True,
        max_chars=lambda _: 4 * MAX_BODY,
        timeout_s=1.0,
    )


def _pairs(source: str | None, texts: Texts, options: m.PromptOptions, n: int) -> Callable[[], object]:
    query, documents = texts(n)
    prompts = _prompts(source)
    keep = MAX_LEN if options.truncate else None

    def work() -> None:
        for number, document in enumerate(documents):
            submit = m.Submit(number, 1, 0, 0.0, m.TextPrompt(query, document), POOLED, prompt_options=options)
            with contextlib.suppress(RequestRejected):
                prompts.encode(submit, keep, is_short=False)

    return work
