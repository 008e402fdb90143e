"""A plain server around OpenVINO GenAI's continuous batching, with POST /v1/chat/completions, to measure it beside us:

    python3 -m venv /tmp/openvino && /tmp/openvino/bin/pip install openvino-genai
    /tmp/openvino/bin/python tools/compare_peers/openvino_server.py MODEL.gguf PORT
    pipeline bench --url http://127.0.0.1:PORT

It needs nothing of this repository. One thread computes steps; a thread for each request turns ids into text and sends
them, as the package's own samples do.
"""

import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai as genai

NAME = "model"
KV_GIB = 2
MAX_NUM_SEQS = 32
CONTEXT_IDS = 8
"""Ids before the newest that are turned into text again with it: some characters are of several ids."""
TOKEN_S = 600.0


class Engine:
    """The pipeline, and the thread that computes while requests are open."""

    def __init__(self, model: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = KV_GIB, MAX_NUM_SEQS
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})
        self.tokenizer = self._pipeline.get_tokenizer()
        self._changed = threading.Condition()
        self._open: dict[int, tuple[Any, queue.Queue[list[int] | None]]] = {}
        self._num_requests = 0
        threading.Thread(target=self._compute, daemon=True).start()

    def add(self, prompt: str, config: Any) -> "queue.Queue[list[int] | None]":
        """Where the new ids of each step arrive, and None after the last ones."""
        ids: queue.Queue[list[int] | None] = queue.Queue()
        with self._changed:
            self._num_requests += 1
            handle = self._pipeline.add_request(self._num_requests, prompt, config)
            self._open[self._num_requests] = handle, ids
            self._changed.notify()
        return ids

    def _compute(self) -> None:
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
            self._pipeline.step()
            with self._changed:
                for number, (handle, ids) in list(self._open.items()):
                    while handle.can_read():
                        for output in handle.read().values():
                            ids.put(list(output.generated_ids))
                    if handle.get_status() != genai.GenerationStatus.RUNNING:
                        ids.put(None)
                        del self._open[number]


class Handler(BaseHTTPRequestHandler):
    """The routes that `pipeline bench` calls."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        self._answer({"data": [{"id": NAME}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokenizer = self.engine.tokenizer
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        num_prompt = tokenizer.encode(prompt, add_special_tokens=False).input_ids.shape[1]
        config = genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.apply_chat_template = False
        if body.get("temperature"):
            config.do_sample, config.temperature = True, body["temperature"]
        arriving = self.engine.add(prompt, config)
        if body.get("stream"):
            self._stream(arriving, num_prompt)
            return
        ids: list[int] = []
        while (new := arriving.get(timeout=TOKEN_S)) is not None:
            ids += new
        message = {"role": "assistant", "content": tokenizer.decode(ids)}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        self._answer({"choices": [choice], "usage": _usage(num_prompt, len(ids))})

    def _stream(self, arriving: "queue.Queue[list[int] | None]", num_prompt: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        decode = self.engine.tokenizer.decode
        ids: list[int] = []
        done = 0
        while (new := arriving.get(timeout=TOKEN_S)) is not None:
            ids += new
            begin = max(0, done - CONTEXT_IDS)
            before, text = decode(ids[begin:done]) if done else "", decode(ids[begin:])
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            done = len(ids)
            self._event({"choices": [{"index": 0, "delta": {"content": text[len(before) :]}}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        self._event({"choices": [], "usage": _usage(num_prompt, len(ids))})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing: it would take part in what is measured."""


def _usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion}


if __name__ == "__main__":
    Handler.engine = Engine(sys.argv[1])
    print("ready", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
