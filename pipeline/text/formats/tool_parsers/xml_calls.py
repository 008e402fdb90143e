"""Tool calls in tags: the formats of GLM 4.5 to 4.7, Qwen 3 Coder and Seed-OSS.

    <tool_call>find                                               <tool_call>
    <arg_key>text</arg_key>                                       <function=find>
    <arg_value>a</arg_value>                                      <parameter=text>
    <arg_key>n</arg_key>                                          a
    <arg_value>5</arg_value>                                      </parameter>
    </tool_call>                             GLM                  …     Qwen; Seed-OSS has <seed:tool_call>

Sources: the chat templates of zai-org/GLM-4.6, GLM-4.7-Flash, Qwen/Qwen3-Coder and ByteDance-Seed/Seed-OSS
"""

from collections.abc import Collection, Mapping

import msgspec

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.grammar.own_syntax import Parameter, json_text, parameters, text_body
from pipeline.text.formats.parsing.call_start import CallStart
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.xml_parser import Tags, XmlParser
from pipeline.text.formats.tool_format import ToolFormat

GLM = Tags("<tool_call>", "</tool_call>", before_value="<arg_value>")
QWEN = Tags(
    "<tool_call>", "</tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", True
)
SEED = msgspec.structs.replace(QWEN, start="<seed:tool_call>", end="</seed:tool_call>", has_lines=False)


def seen(tags: Tags, marks: ReplyMarks) -> Tags:
    """Tags as a parser looks for them."""
    return msgspec.structs.replace(tags, start=marks.of(tags.start), end=marks.of(tags.end))


class XmlFormat(ToolFormat):
    is_typed = True

    def __init__(self, name: str, tags: Tags, aliases: tuple[str, ...] = (), stops: tuple[str, ...] = ()) -> None:
        self.name = name
        self.aliases = aliases
        self.stops = stops
        self.tags = tags
        self.opening = tags.start
        self.marks = (tags.start, tags.end)

    def detects(self, template: str) -> bool:
        tags = self.tags
        return tags.start in template and (tags.before_name or tags.before_key) in template

    def call_start(self, names: Collection[str], marks: ReplyMarks) -> CallStart | None:
        tags = self.tags
        before = (tags.before_name,) if tags.before_name else ()
        behind = (tags.after_name,) if tags.after_name else (tags.before_key, marks.of(tags.end))
        return CallStart(marks.of(tags.start), before, behind, tuple(names))

    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> CallParser:
        return XmlParser(seen(self.tags, marks), names, marks.hidden)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        line = "" if "<arg_key>{arg-key-1}</arg_key><arg_value>" in lark.template else "\n"
        one = lark.one_of([self._call(lark, call, line) for call in calls])
        return f"{one} ({lark.text(line) if line else ''} {one})*" if parallel else one

    def _call(self, lark: LarkBuilder, call: CallRule, line: str) -> str:
        tags = self.tags
        begin = [tags.start, line if tags.before_name else "", tags.before_name, call.name, tags.after_name, line]
        end = [line if tags.call_end else "", tags.call_end, line if tags.call_end else "", tags.end]
        listed = parameters(call.schema)
        members = [None] if listed is None else [self._member(lark, one, line) for one in listed]
        if None in members:
            return f"{lark.sequence(*begin)} {call.arguments} {lark.sequence(line, *end[1:])}"
        if tags.call_end:
            begin.pop()  # each member begins with its line
        return f"{lark.sequence(*begin)} {' '.join(map(str, members))} {lark.sequence(*end)}"

    def _member(self, lark: LarkBuilder, parameter: Parameter, line: str) -> str | None:
        """A parameter; None if the syntax can't express it."""
        tags = self.tags
        name = lark.text(parameter.name)  # not in a sequence: it may spell a special token
        if parameter.name != parameter.name.strip() or tags.after_key in parameter.name:
            return None
        around = "\n" if tags.has_lines else ""
        if tags.call_end:
            begin = f"{lark.sequence(line, tags.before_key)} {name} {lark.sequence(tags.after_key, around)}"
        else:
            begin = f"{lark.sequence(tags.before_key)} {name} {lark.sequence(tags.after_key, line, tags.before_value)}"
        behind = "" if tags.call_end else lark.text(line) if line else ""
        if parameter.is_text:
            body = text_body(parameter.schema)
            if body is None or tags.after_value in str(parameter.schema.get("enum", parameter.schema.get("const", ""))):
                return None
            value = lark.text_until(body, tags.after_value, around)
        else:
            value = f"{json_text(lark, parameter)} {lark.sequence(around, tags.after_value)}"
        whole = f"{begin} {value} {behind}"
        return whole if parameter.is_required else f"({whole})?"
