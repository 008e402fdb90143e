"""How models write what is more than plain content: calls of tools, and reasoning. Pure: text in, events out.

    text ──specials──► without what nobody is to see ──reasoning──► reasoning │ the rest ──tool format──► content, calls

A *format* knows how a family of models writes (`hermes.py`, `llama3.py`, `mistral.py`; `reasoning.py`): the marks it
uses, how to tell from a chat template that a model belongs to it, a parser that takes a reply's text as it comes, and
for calls that a client insists on, the grammar of them. `chat_formats.py` has what one model uses, and puts the parts
together.

What a parser says depends on the text alone, and not on the pieces in which it comes: joined, the contents, the
reasoning and the arguments of each call are the same. It holds back what may still become something else, in time and
memory that grow with the text and no faster, and gives it at the end. Text that is no call after all is content.
"""
