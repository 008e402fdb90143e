"""Recording what a stage receives, and driving the same stage from that.

A stage is a function of what comes to it from outside: the messages, and how they were grouped into wakes; the clock
and the random numbers that it asks for; which of its sends a full socket refused; and, in an asyncio stage, when what
ran beside the loop was done. A recording holds these in the order in which the stage met them, and, if asked for,
what the stage sent. A replay gives them back in that order, so the stage does and sends the same, bit for bit.

    tape.py      what a stage asks instead of the clock; by itself it records nothing
    format.py    the file
    recorder.py  a tape that writes
    player.py    a tape that reads, with the inbox and the outboxes of a stage that is replayed
    partial.py   what is done about recordings that began when the stage had work already
    compare.py   are two records of what was sent the same?
    command.py   `pipeline record` and `pipeline replay`
"""
