"""Records what a stage receives, and runs the same stage from the recording.

The behaviour of a stage depends only on its inputs: the messages, and how they were grouped into wakes; the clock and
the random numbers that it reads; which of its sends a full socket refused; and, in an asyncio stage, when work beside
the loop ended. A recording holds these in order, and optionally what the stage sent. A replay returns them in the same
order, so the stage sends the same bytes.

    format.py            the file format
    recorder.py          the replay context that records
    player.py            the replay context that plays a recording
    replay_channels.py   the inbox and outboxes of a replayed stage
    open_stage.py        gives a stage these, or its sockets
    partial.py           rules for recordings that began when the stage already had work
    compare.py           compares two recordings of what was sent

The commands are in pipeline/cli/replay/.
"""
