"""What a parser of replies says."""

import msgspec


class Content(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """The model calls a tool."""

    index: int
    """Of the reply's calls, from 0."""
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments, as the model writes it."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The call is whole. One that the reply breaks off never says so."""

    index: int


Event = Content | Reasoning | CallBegun | Arguments | CallEnded
"""A call has one `CallBegun`, then its `Arguments`, then `CallEnded`; calls do not overlap."""
