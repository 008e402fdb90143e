"""Parse model output into content, reasoning and tool calls. Pure: text in, events out.

    text ──specials──► without hidden tokens ──reasoning──► reasoning │ the rest ──tool format──► content, tool calls

A *format* describes how a model family writes tool calls (a file in `tool_parsers/`) or reasoning (`reasoning.py`). In
the replies of gpt-oss and Muse Glimmer both alternate, so one parser reads them (`parsing/messages.py`). A format has
the marks, a test whether a chat template belongs to the family, a streaming parser, and for required tool calls a
grammar. `parsing/` and `grammar/` have what several formats use. `chat_formats.py` selects and combines the formats of
one model.

The parsed contents, reasoning and arguments depend only on the text, not on how it is split into chunks. Parsers hold
back text that may become part of a mark or call, and flush it at the end. Time and memory are linear in the text. Text
that turns out not to be a call becomes content.
"""
