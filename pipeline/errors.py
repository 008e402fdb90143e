"""What a user can mend, told apart from what only we can."""


class UserError(ValueError):
    """The server can't do what it was asked to, and the message says, in the user's words, what would help. It is shown
    as a line; every other exception of a stage is shown with its traceback."""
