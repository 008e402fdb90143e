"""A closed loop of streaming clients against any server with the OpenAI API.

Each of `concurrency` streams sends a request, reads its tokens as they come, and sends the next. A level is one
concurrency at one temperature.

With a duration, the measured window opens once each stream has completed its warm-up requests, and every stream is busy
until it closes. The last warm-up requests ask for outputs of evenly spread lengths, so that from then on the streams
end their requests one after the other, not all at once. After the window no request is sent, but running ones are read
to the end, because the server's `usage` says how many tokens they had. With a number of requests, all streams wait for
each other after the warm-up. The window then lasts from the first request sent to the last one read, including the tail
in which fewer streams run.

- Output tokens/s: tokens that arrived in the window. A request's tokens are spread evenly over its chunks, so only the
  chunks inside the window count.
- Total tokens/s: also the prompt tokens of each request whose first text arrived in the window.
- TTFT: the time from sending a request to its first text, for requests sent in the window.
- ITL: the gap between two chunks of one stream, if the second arrived in the window.
- TPOT: (last text - first text) / (tokens - 1), for requests that ended in the window.
- Prefill tokens/s: the median of prompt tokens / TTFT. It measures prefill if one stream sends long prompts.
"""
