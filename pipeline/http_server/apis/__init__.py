"""What the routes of one API have in common, also where no request was parsed: the shape of errors, and headers.

The gateway and the ingress answer with errors before and beside the dialects (`stages/gateway/apis/`): a missing key,
an unknown path, a body that is too large, a lost replica. So this stands below both.

openai.py      OpenAI's API, and the base of the others
anthropic.py   Anthropic's Messages API
ollama.py      Ollama's API
responses.py   OpenAI's Responses API
table.py       finds the one of a path
"""
