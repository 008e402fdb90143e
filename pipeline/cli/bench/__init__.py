"""A closed loop of streaming clients against any server that speaks the OpenAI API, and what they measure.

`concurrency` streams each send a request, read its tokens as they come, and send the next.

With a duration, the window in which things count opens once each stream has made its warm-up request, and every stream
is busy until it closes. The last warm-ups ask for outputs of different length, evenly from a part of it to all of it,
so that from then on the streams end their requests one after the other rather than all in one moment. Once the window
has closed no request is sent, but those under way are read to their end, so that the server's own `usage` says how many
tokens each had. With a number of requests, all streams wait for each other after the warm-up; the window then lasts
from the first request sent to the last one read, its thin end included.

- Output tokens/s count the tokens that arrived in the window. A request's tokens are spread evenly over the chunks
  that it came in, so that of one which lies only partly in the window only that part counts.
- Total tokens/s count besides those the prompt tokens of each request whose first text arrived in the window.
- TTFT is the time from sending a request to its first text, of requests sent in the window.
- ITL is the gap between two chunks of one stream, where the second arrived in the window.
- TPOT is (last text - first text) / (tokens - 1), of requests that ended in the window.
- Prefill tokens/s is the median of prompt tokens / TTFT; it speaks of prefill where one stream sends long prompts.
"""
