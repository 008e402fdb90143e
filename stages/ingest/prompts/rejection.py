"""Why a request is refused."""

from pipeline.runtime.messages import ChatPrompt, Failure, Prompt


class RequestRejected(Exception):
    """The request can't be served. Carries the failure for the client."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def param_of(prompt: Prompt) -> str:
    """The name of the field that has the prompt."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def rejection(message: str, prompt: Prompt) -> RequestRejected:
    return RequestRejected(Failure(400, message, param_of(prompt)))


def received_rejection(index: int, problem: str) -> RequestRejected:
    return RequestRejected(Failure(400, f"received[{index}] {problem}", "received"))
