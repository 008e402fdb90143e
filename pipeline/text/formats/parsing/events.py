"""The events that a reply parser emits."""

import msgspec


class Content(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A tool call starts."""

    index: int
    """The call's number in the reply, from 0."""
    name: str
    id: str = ""
    """The call's id, if the model wrote one that it expects back."""


class Arguments(msgspec.Struct, frozen=True):
    """A chunk of the JSON text of a call's arguments, as the model wrote it, or converted from another syntax."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The call is complete. A call that the end of the reply cuts off has no `CallEnded`."""

    index: int


Event = Content | Reasoning | CallBegun | Arguments | CallEnded
"""A call has one `CallBegun`, then its `Arguments`, then `CallEnded`; calls do not overlap."""
