"""Compares both servers on one file."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.stages.prepare.gguf.tokenizers.special_tokens import NORMAL
from tools.compare_llama_server.inputs import CHATS, PLAIN, marked, texts_of
from tools.compare_llama_server.servers import Rendered, Reply, Server
from tools.compare_llama_server.variants import FileVariant
from tools.tokenizer_vectors.vocabularies import BYTE

MAX_TOKENS = 24
BESIDE = 4
"""Output tokens of a prompt behind which a special token follows."""
STARTS = 4
"""Places of the cycle from which replies are compared."""
MAX_LOGPROB_ERROR = 0.05
"""Logits are at most about 10 here, and both servers round activations to 8 bits at some places: llama.cpp for weights
in bfloat16 and in blocks, Pipeline always. Two such roundings of a logit of 10 differ by 10 / 256 at most."""


class Case(NamedTuple):
    """One comparison: the question, and both results."""

    variant: FileVariant
    what: str
    asked: Any
    ours: Any
    theirs: Any
    again: Any = None
    """If they differ: of a chat, Pipeline's result with llama.cpp's variables of templates; of a text without special
    tokens, llama.cpp's texts of both lists."""

    @property
    def is_equal(self) -> bool:
        match self.ours, self.theirs:
            case Reply(), Reply():
                return is_same_reply(self.ours, self.theirs)
            case Rendered(), Rendered():
                # Pipeline's text is that of the ids, in which a vocabulary may have more spaces.
                return bool(self.ours.ids == self.theirs.ids)
        return bool(self.ours == self.theirs)


def is_same_reply(ours: Reply, theirs: Reply) -> bool:
    """Whether two replies agree. llama.cpp has no log probabilities of tokens whose text waits for more bytes, and
    of the token that ends a reply."""
    if (ours.text, ours.ends) != (theirs.text, theirs.ends):
        return False
    logprobs: list[float | None] = [*ours.logprobs] or [None] * len(ours.ids)
    pairs = iter(zip(ours.ids, logprobs, strict=True))
    for token_id, logprob in zip(theirs.ids, theirs.logprobs, strict=True):
        ours_of = next((found for one, found in pairs if one == token_id), math.inf)
        if ours_of is not None and abs(ours_of - logprob) > MAX_LOGPROB_ERROR:
            return False
    return True


def compare(variant: FileVariant, order: Sequence[int], ours: Server, theirs: Server) -> Iterator[Case]:
    """All cases of a file, whose model writes the tokens in this `order`."""

    def case(what: str, asked: Any, method: str, *arguments: Any, **options: Any) -> Case:
        results = [getattr(server, method)(*arguments, **options) for server in (ours, theirs)]
        return Case(variant, what, asked, *results)

    tokens = variant.keys["tokens"]
    special = [i for i, kind in enumerate(variant.types) if kind not in (NORMAL, BYTE)]
    marks = [tokens[i] for i in special]
    if variant.is_chat:
        yield from _chats(variant, marks, case)
        return
    for text in [*PLAIN, *texts_of(marks)]:
        yield case("tokenize", text, "tokenize", text, special=True, ends=False)
        yield case("tokenize with BOS and EOS", text, "tokenize", text, special=True, ends=True)
        plain = case("tokenize marks as text", text, "tokenize", text, special=False, ends=False)
        if not plain.is_equal:
            plain = plain._replace(again=[theirs.detokenize(ids) for ids in (plain.ours, plain.theirs)])
        yield plain
    for ids in _runs(order, special):
        yield case("detokenize", ids, "detokenize", ids)
    indices = {token_id: index for index, token_id in enumerate(order)}
    for token_id in special:
        before = [order[(indices[token_id] + step) % len(order)] for step in (-2, -1)]
        yield case(f"reply with {tokens[token_id]}", before, "complete", before, BESIDE)
    for start in range(STARTS):
        at = start * len(order) // STARTS
        yield case("reply", order[at : at + 3], "complete", order[at : at + 3], MAX_TOKENS)


def _runs(order: Sequence[int], special: Sequence[int]) -> Iterator[list[int]]:
    """Lists of ids: of single tokens, of some in a row, and of special ones beside others."""
    for at in range(0, len(order), max(1, len(order) // 40)):
        yield [order[at]]
        yield list(order[at : at + 7])
    for token_id in special:
        yield [token_id]
        yield [order[0], token_id, order[1]]
        yield [token_id, token_id]


def _chats(variant: FileVariant, marks: Sequence[str], case: Any) -> Iterator[Case]:
    chats: Mapping[str, Any] = {**CHATS, "marks": marked(marks)}
    for name, body in chats.items():
        found = case("chat", name, "render", body)
        if not found.is_equal:
            kwargs = {**defaults(), **body.get("chat_template_kwargs", {})}
            again = case("chat", name, "render", {**body, "chat_template_kwargs": kwargs}).ours
            found = found._replace(again=again)
        yield found
        if found.is_equal:
            yield case("chat's reply", name, "chat", body, MAX_TOKENS)


def defaults() -> dict[str, Any]:
    """The variables that llama.cpp gives to all templates: thinking is on, the reasoning of earlier turns stays,
    and two names are for today's date."""
    return {
        "enable_thinking": True,
        "preserve_thinking": True,
        "clear_thinking": False,
        "truncate_history_thinking": False,
        "drop_thinking": False,
        "date_string": time.strftime("%d %b %Y"),
        "datetime": time.strftime("%b %d %Y"),
    }
