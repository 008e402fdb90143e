"""Closing asyncio's servers in tests without leaving a socket to the garbage collector."""

import asyncio


async def all_accepted() -> None:
    """Wait until no server of this event loop is accepting a connection: asyncio of Python 3.11 forgets one that it has
    accepted when the server is closed, so its socket stays open until garbage is collected."""
    while any(getattr(task.get_coro(), "__name__", "") == "_accept_connection2" for task in asyncio.all_tasks()):
        await asyncio.sleep(0.01)
