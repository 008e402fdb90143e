"""A closed or an open loop of streaming clients against any server with the OpenAI API.

In a closed loop, each of `concurrency` streams sends a request, reads its tokens as they come, and sends the next. A
level is one concurrency at one temperature.

With a duration, the measured window opens once each stream has completed its warm-up requests, and every stream is busy
until it closes. The last warm-up requests ask for outputs of evenly spread lengths, so that from then on the streams
end their requests one after the other, not all at once. After the window no request is sent, but running ones are read
to the end, because the server's `usage` says how many tokens they had. With a number of requests, all streams wait for
each other after the warm-up. The window then lasts from the first request sent to the last one read, including the tail
in which fewer streams run.

In an open loop (`--request-rate`), requests arrive by a gamma process, however long the server takes, beside
`concurrency` streams that decode all the time: prompts of 64 words, 1,024 tokens out, and then the next one. The window
opens when all streams have their first text, and then requests arrive. It lasts for the duration, or until the last of
a number of requests is read. After it, no request is sent, and the streams run until those that arrived are read to
their ends. Then they are cut off. TTFT, ITL and TPOT are of the requests that arrived, the streams' ITL is beside them.

- Output tokens/s: tokens that arrived in the window. A request's tokens are spread evenly over its chunks, so only the
  chunks inside the window count.
- Total tokens/s: also the prompt tokens of each request whose first text arrived in the window.
- TTFT: the time from sending a request to its first text, for requests sent in the window.
- ITL: the gap between two chunks of one stream, if the second arrived in the window.
- TPOT: (last text - first text) / (tokens - 1), for requests that ended in the window.
- Prefill tokens/s: the median of prompt tokens / TTFT. It measures prefill if one stream sends long prompts.
"""
