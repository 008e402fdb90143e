"""The supervisor decides which adapter has a name: gateways may be asked for one name at the same time."""

import logging
from types import SimpleNamespace
from typing import Any

from pipeline.runtime import messages as m
from pipeline.supervisor.reconfigure.adapters import Adapters


def test_an_adapter_that_is_to_be_new_replaces_none() -> None:
    resources, sent = SimpleNamespace(adapters={}), list[tuple[str, Any]]()
    table: Any = SimpleNamespace(children={"gateway.0": None}, reply=lambda name, one: sent.append((name, one)))
    adapters = Adapters(resources, table, logging.getLogger("test"))  # type: ignore[arg-type]
    first, second = m.Adapter("sql", "a", "/a"), m.Adapter("sql", "b", "/b")
    adapters.set(m.SetAdapter(1, first, is_new=True), "gateway.0")
    adapters.set(m.SetAdapter(2, second, is_new=True), "gateway.1")
    assert resources.adapters == {"sql": first}
    assert sent[-1] == ("gateway.1", m.AdapterSet(2, is_taken=True))
    assert ("gateway.0", m.AdapterSet(1)) in sent
    adapters.set(m.SetAdapter(3, second), "gateway.1")
    assert resources.adapters == {"sql": second}
