"""Where Pipeline differs from llama.cpp's server on purpose. docs/models.md lists the kinds."""

import itertools
import re
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.stages.prepare.gguf.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from pipeline.stages.prepare.gguf.tokenizers.special_tokens import NORMAL
from tools.compare_llama_server.compare import Case, is_same_reply
from tools.compare_llama_server.inputs import CHATS
from tools.compare_llama_server.servers import ErrorReply, Rendered, Reply
from tools.compare_llama_server.variants import UNUSED
from tools.tokenizer_vectors.texts import DIFFERENT, TEXTS
from tools.tokenizer_vectors.vocabularies import BYTE

COMMA = 11
"""llama.cpp's BOS and EOS of a byte-level vocabulary without keys."""
SHOWN = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
"""Special tokens that llama.cpp shows in every text."""
TOOLS_AS_TEXT = "You may call one or more of these functions if that helps"
SPACE = "▁"


class Rule(NamedTuple):
    """`explains` says whether a case that differs does so by this rule."""

    name: str
    reason: str
    explains: Callable[[Case], bool]


def rule_of(case: Case) -> Rule | None:
    """The first rule that explains a difference."""
    return next((rule for rule in RULES if rule.explains(case)), None)


def _by_text(same: Callable[[Case, str, str], bool]) -> Callable[[Case], bool]:
    """A rule of texts that are made of the same ids: of /detokenize or of replies."""

    def explains(case: Case) -> bool:
        if case.what == "detokenize":
            return isinstance(case.theirs, str) and isinstance(case.ours, str) and same(case, case.ours, case.theirs)
        if not (isinstance(case.ours, Reply) and isinstance(case.theirs, Reply)):
            return False
        is_same = is_same_reply(case.ours, case.theirs._replace(text=case.ours.text))
        return is_same and same(case, case.ours.text, case.theirs.text)

    return explains


def _whole(text: str) -> str:
    """A text without the parts of characters at its ends, and with one mark for several others in a row."""
    return re.sub("\ufffd+", "\ufffd", text).strip("\ufffd")


def _without(text: str, *parts: str) -> str:
    for part in parts:
        text = text.replace(part, "")
    return _whole(text)


def _are_incomplete(case: Case, ours: str, theirs: str) -> bool:
    """A reply may begin with the end of a character whose beginning is the prompt's."""
    is_end = case.what == "reply" and theirs[:1] == "\ufffd"
    return _whole(theirs) in (_whole(ours), *([_whole(ours[1:])] if is_end else []))


def _is_space_left_out(case: Case, ours: str, theirs: str) -> bool:
    return case.variant.vocabulary != "byte-level" and theirs[:1] == " " and _whole(ours) == _whole(theirs[1:])


def _is_end_left_out(case: Case, ours: str, theirs: str) -> bool:
    tokens = case.variant.keys["tokens"]
    if not (isinstance(case.ours, Reply) and case.ours.ends):
        return False
    return any(_whole(theirs) == _whole(ours) + tokens[i] for i in case.ours.ids[-1:])


def _are_marks_shown(case: Case, ours: str, theirs: str) -> bool:
    return _without(ours, *SHOWN) == _without(theirs, *SHOWN)


def _are_marks_found(case: Case) -> bool:
    """llama.cpp finds them in texts whose special tokens are text, too."""
    marks = set(SHOWN) & set(case.variant.added)
    return case.what == "tokenize marks as text" and any(mark in case.asked for mark in marks)


def _are_unused_shown(case: Case, ours: str, theirs: str) -> bool:
    unused = [token for token, kind in case.variant.added.items() if kind == UNUSED]
    return bool(unused) and _without(ours, *unused) == _without(theirs, *unused)


def _are_spaces_of_specials(case: Case, ours: str, theirs: str) -> bool:
    return (
        case.variant.vocabulary != "byte-level" and _whole(ours).strip() == _whole(theirs).replace(SPACE, " ").strip()
    )


def _are_bytes_without_types(case: Case, ours: str, theirs: str) -> bool:
    if "token_type" not in case.variant.changes:
        return False
    by_bytes = re.sub("(?:<0x[0-9A-F]{2}>)+", _decoded, theirs)
    return _whole(ours).strip() == _whole(by_bytes).strip()


def _decoded(match: re.Match[str]) -> str:
    return bytes.fromhex(re.sub("<0x|>", "", match[0])).decode("utf-8", "replace")


def _is_by_pattern(case: Case) -> bool:
    """Texts that llama.cpp's own patterns split otherwise; see tools/tokenizer_vectors/texts.py."""
    if not case.what.startswith("tokenize") or case.asked not in TEXTS:
        return False
    names = {case.variant.vocabulary, case.variant.keys.get("pre")}
    number = TEXTS.index(case.asked)
    return any(number in numbers and names & set(pres.split()) for pres, numbers in DIFFERENT)


def _is_composed(case: Case) -> bool:
    pre = PRE_TOKENIZERS.get(case.variant.keys.get("pre", ""))
    is_text = case.what.startswith("tokenize")
    return is_text and pre is not None and pre.composes and unicodedata.normalize("NFC", case.asked) != case.asked


def _is_by_spaces(case: Case) -> bool:
    """Of a unigram model that keeps all spaces: the ids without repetitions."""
    if not (case.what.startswith("tokenize") and case.variant.vocabulary == "unigram with all spaces"):
        return False
    return [i for i, _ in itertools.groupby(case.ours)] == [i for i, _ in itertools.groupby(case.theirs)]


def _is_by_comma(case: Case) -> bool:
    """What llama.cpp makes of its default id of a byte-level vocabulary."""
    if case.variant.vocabulary != "byte-level":
        return False
    if isinstance(case.theirs, Reply):
        return "eos_token_id" in case.variant.changes and COMMA in case.ours.ids and case.theirs.ends
    ids = _ids(case.theirs)
    return "bos_token_id" in case.variant.changes and ids[:1] == [COMMA] and ids[1:] == _ids(case.ours)


def _has_separator(case: Case) -> bool:
    return case.what == "tokenize with BOS and EOS" and case.ours[:-1] == case.theirs


def _ids(result: Any) -> list[int]:
    return result.ids if isinstance(result, Rendered) else result if isinstance(result, list) else []


def _plain_ids(case: Case, result: Any) -> list[int]:
    """The ids of a prompt without BOS and EOS at its ends."""
    keys, ids = case.variant.keys, _ids(result)
    if ids[:1] == [keys.get("bos_token_id")]:
        ids = ids[1:]
    return ids[:-1] if ids[-1:] == [keys.get("eos_token_id")] else ids


def _are_ends_added(case: Case) -> bool:
    return isinstance(case.ours, Rendered) and _plain_ids(case, case.ours) == _plain_ids(case, case.theirs)


def _is_by_variables(case: Case) -> bool:
    return isinstance(case.again, Rendered) and _plain_ids(case, case.again) == _plain_ids(case, case.theirs)


def _are_tools_as_text(case: Case) -> bool:
    return isinstance(case.ours, Rendered) and TOOLS_AS_TEXT in case.ours.text


def _is_refused(*words: str) -> Callable[[Case], bool]:
    def explains(case: Case) -> bool:
        refused = [one for one in (case.ours, case.theirs) if isinstance(one, ErrorReply)]
        return any(word in one.message for one in refused for word in words)

    return explains


def _are_parts_joined(case: Case) -> bool:
    if not (case.asked == "parts" and isinstance(case.theirs, Rendered)):
        return False
    ours, theirs = (one.text.removeprefix("<s>") for one in (case.ours, case.theirs))
    return bool(ours == theirs.replace("\n two ", " two "))


def _is_reply(case: Case) -> bool:
    return case.what == "chat's reply"


def _is_parsed(case: Case) -> bool:
    """A reply with the same ids whose special tokens, or the text before them, belong to a format."""
    if not (_is_reply(case) and isinstance(case.theirs, Reply)):
        return False
    return is_same_reply(case.ours, case.theirs._replace(text=case.ours.text))


def _has_call(case: Case) -> bool:
    """A reply to a chat with tools: equal up to the token that begins a call."""
    if not (_is_reply(case) and isinstance(case.theirs, Reply) and "tools" in CHATS.get(case.asked, {})):
        return False
    pairs = zip(case.ours.ids, case.theirs.ids, strict=False)
    same = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return bool(same) and case.variant.types[same[-1]] not in (NORMAL, BYTE)


def _ends_by_format(case: Case) -> bool:
    if not (_is_reply(case) and isinstance(case.theirs, Reply)):
        return False
    return bool(case.ours.ends and case.ours.ids == case.theirs.ids[: len(case.ours.ids)])


RULES: tuple[Rule, ...] = (
    Rule(
        "incomplete characters",
        "each byte that is no part of a character is U+FFFD, as in transformers; llama.cpp leaves some out",
        _by_text(_are_incomplete),
    ),
    Rule(
        "space before texts",
        "the space that the vocabulary adds before a text is not part of it, as in SentencePiece",
        _by_text(_is_space_left_out),
    ),
    Rule(
        "ends are not text",
        "the token that ends a reply is never part of its text; llama.cpp shows it if it has the type of a word",
        _by_text(_is_end_left_out),
    ),
    Rule(
        "marks of messages",
        "gpt-oss's marks are special tokens: replies are parsed from ids, and no text shows them",
        lambda case: _are_marks_found(case) or _by_text(_are_marks_shown)(case),
    ),
    Rule(
        "unused tokens",
        "tokens of the type UNUSED have their text, as in transformers",
        _by_text(_are_unused_shown),
    ),
    Rule(
        "bytes without types",
        "<0x0A> is a byte in a SentencePiece vocabulary, also in files without types",
        _by_text(_are_bytes_without_types),
    ),
    Rule(
        "spaces in special tokens",
        "▁ is a space in the text of all tokens of a SentencePiece vocabulary, as in transformers",
        _by_text(_are_spaces_of_specials),
    ),
    Rule(
        "marks as text",
        "special tokens in messages are cut behind their first character, and never become special",
        lambda case: case.what == "tokenize marks as text" and bool(case.again) and case.again[0] == case.again[1],
    ),
    Rule(
        "the model's own pattern",
        "llama.cpp's matcher lacks categories of characters and approximates some patterns",
        _is_by_pattern,
    ),
    Rule("NFC", "the models' own tokenizers compose characters; llama.cpp leaves that to its caller", _is_composed),
    Rule(
        "spaces of unigram models",
        "SentencePiece adds a space also to a text that begins or ends with spaces",
        _is_by_spaces,
    ),
    Rule(
        "equal scores",
        "of pairs with equal scores, the token with the smaller id is merged first; no tokenizer writes such scores",
        lambda case: "scores" in case.variant.changes and case.what.startswith("tokenize"),
    ),
    Rule(
        "separator", "texts end with the separator if the file says so; llama.cpp only reranks with it", _has_separator
    ),
    Rule(
        "no default of byte-level vocabularies",
        "llama.cpp takes token 11 for BOS and EOS without a key, a comma in most vocabularies",
        _is_by_comma,
    ),
    Rule(
        "BOS and EOS are the template's",
        "a chat has the special tokens that its template writes, as in transformers and vLLM",
        _are_ends_added,
    ),
    Rule(
        "variables of templates",
        "only those of the request: thinking, the reasoning of earlier turns and dates have the template's defaults",
        _is_by_variables,
    ),
    Rule(
        "continued messages",
        "the last message is continued where the template ends it, as in transformers; llama.cpp writes it behind the "
        "beginning of a new reply, and repeats it in the reply",
        lambda case: case.asked == "continued",
    ),
    Rule(
        "tools as text",
        "for templates without tools, and formats that are not parsed, a section of the prompt lists them",
        _are_tools_as_text,
    ),
    Rule(
        "refused by the template",
        "a template's refusal of a chat is an error, as in transformers; llama.cpp changes the chat, or the template",
        _is_refused("System role not supported", "is unsafe", "Conversation roles must alternate"),
    ),
    Rule(
        "not parsed by llama.cpp",
        "it refuses templates of which it can't make a parser, and replies that don't fit",
        _is_refused("Unable to generate parser", "does not match the expected"),
    ),
    Rule("parts", "parts are joined as the template does; llama.cpp joins them by lines", _are_parts_joined),
    Rule(
        "parsed replies",
        "formats are parsed by other rules, with the same ids: spaces around texts, reasoning and special tokens",
        _is_parsed,
    ),
    Rule(
        "grammars of calls",
        "a call that the model begins by itself is free; llama.cpp's grammar begins behind its first token",
        _has_call,
    ),
    Rule(
        "ends of chat formats",
        "a reply ends also where its chat format says so, with <|user|> or <|observation|> in GLM",
        _ends_by_format,
    ),
)
