"""Which LoRA adapters clients may use: those of the settings, and those that clients load and unload."""

import logging

from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.shared.resources import SharedResources


class Adapters:
    """Changes the adapters in the resources, from where each process gets them at its start, and tells the others."""

    def __init__(self, resources: SharedResources, table: ChildTable, log: logging.Logger) -> None:
        self._resources = resources
        self._table = table
        self._log = log

    def set(self, message: m.SetAdapter, sender: str) -> None:
        """Clients may use an adapter, or no longer."""
        adapter, adapters = message.adapter, self._resources.adapters
        if message.is_new and adapter.name in adapters:
            self._table.reply(sender, m.AdapterSet(message.nonce, is_taken=True))
            return
        if adapter.id:
            adapters[adapter.name] = adapter
        else:
            adapters.pop(adapter.name, None)
        self._log.info("adapter" if adapter.id else "adapter removed", extra={"fields": {"name": adapter.name}})
        self.tell()
        self._table.reply(sender, m.AdapterSet(message.nonce))

    def tell(self) -> None:
        """Tell all gateways which adapters clients may use, and the executor, which loads them before they are used."""
        adapters = list(self._resources.adapters.values())
        for name in (topology.EXECUTE, *topology.among(self._table.children, "gateway")):
            self._table.reply(name, m.Adapters(adapters))
