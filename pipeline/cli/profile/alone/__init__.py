"""One stage as a process of its own, between fakes of its neighbours that give it more than it can do.

harness.py   the process, and the other ends of its sockets and shared memory
loads.py     what each stage is given, and how what comes back is counted
http.py      clients of the gateway that read and forget
clock.py     what a process has used, from the kernel
measure.py   warm up, measure, and make a result of it
result.py    the result as numbers, and as a table
"""
