"""Reads a connection in small steps, as long as they are cheap, instead of all at once.

What arrives may be dear for its size: 256 KiB are 2,000 headers, or over TLS ten thousand updates of the keys, and the
loop would parse or decrypt all of it before it looks at anybody else's.
"""

import asyncio
import time
from collections.abc import Callable

STEP_BYTES = 8 * 1024
"""What is read before the time is looked at. It may be 300 updates of the keys, which take 6 ms, or 350 records of one
byte, or 1,000 headers."""
MAX_READ_BYTES = 32 * STEP_BYTES
MAX_READ_S = 0.002
"""CPU time after which a connection is read no more in its turn. Data of MAX_READ_BYTES takes less."""


def read_in_steps(transport: asyncio.Transport, step: Callable[[], int], is_paused: Callable[[], bool]) -> int:
    """Read a connection whose transport does not read. `step` reads up to STEP_BYTES from the socket, uses them, and
    returns how many they were; `is_paused` says that no more is wanted. Returns the bytes in all; -1 if the connection
    ends: its transport does the rest."""
    end_s, num_read = time.thread_time() + MAX_READ_S, 0
    while not transport.is_closing():
        try:
            num = step()
        except BlockingIOError:
            break
        except OSError:  # the client has left
            transport.abort()
            return -1
        if not num:  # its end, which the transport must see
            transport.resume_reading()
            return -1
        num_read += num
        if num < STEP_BYTES or num_read >= MAX_READ_BYTES or is_paused() or time.thread_time() > end_s:
            break
    return num_read
