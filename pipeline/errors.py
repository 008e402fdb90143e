"""What a user can mend, told apart from what only we can."""

import warnings


class UserError(ValueError):
    """The server can't do what it was asked to, and the message says, in the user's words, what would help. It is shown
    as a line; every other exception of a stage is shown with its traceback."""


class StartError(UserError):
    """A server of one's own could not be started; the message says why, in the server's own words."""


class PromptError(UserError):
    """A prompt, or its sampling parameters, can't be served; the message names the prompt where there are several."""

    def __init__(self, message: str, *, index: int | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.index = index
        """Which of the call's prompts."""
        self.status = status
        """The HTTP status that the same request would be answered with."""
        self.code = code
        """For programs, as `context_length_exceeded`."""

    @property
    def place(self) -> int | None:  # words: ok
        """The old name of `index`, for one more release."""
        warnings.warn("PromptError.place is now PromptError.index", DeprecationWarning, stacklevel=2)
        return self.index


class ServerFailed(UserError):
    """The server has ended, can't be reached any more, or could not finish a request."""
