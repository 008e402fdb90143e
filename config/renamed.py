"""Old names of settings and of their values. Each works for one release, with a warning that names the new one."""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "gateway.max_open_requests": "gateway.max_open_sequences",
    "gateway.allow_open": "gateway.allow_unauthenticated",
    "schedule.depth": "schedule.max_steps_in_flight",
    "schedule.long_prompt_stretch": "schedule.long_prompt_max_slowdown",
    "execute.early_launch": "execute.programmatic_dependent_launch",
    "execute.gpu_memory_fraction": "execute.gpu_memory_utilization",
    "execute.kv_groups": "execute.hybrid_kv_cache_manager",
    "execute.threads": "execute.num_threads",
    "chat.tool_format": "chat.tool_call_parser",
    "chat.reasoning_format": "chat.reasoning_parser",
}
"""Old dotted key → new dotted key."""

RENAMED_VALUES = {("execute.activations", "int16"): "int12"}
"""New dotted key and old value → new value."""


def warning_of(old: str) -> str:
    """The warning for a setting given by its old name."""
    return f"{old} is now {RENAMED[old]}; the old name will be removed in the next release"


def new_value(dotted: str, value: Any) -> Any:
    """The value by its new name, if it has one."""
    return RENAMED_VALUES.get((dotted, value), value) if isinstance(value, str) else value


def warning_of_value(dotted: str, old: str) -> str:
    """The warning for a value given by its old name."""
    return f"{dotted}={old} is now {dotted}={new_value(dotted, old)}; the old name will be removed in the next release"


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of settings, as `Settings` is encoded, with each old name of a key or a value replaced: recordings of
    older versions hold them."""
    renamed = dict(tree)
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        table = renamed.get(section)
        if isinstance(table, dict) and name in table:
            renamed[section] = {new.partition(".")[2] if key == name else key: value for key, value in table.items()}
    for dotted, _ in RENAMED_VALUES:
        section, _, name = dotted.partition(".")
        table = renamed.get(section)
        if isinstance(table, dict) and name in table:
            renamed[section] = table | {name: new_value(dotted, table[name])}
    return renamed
