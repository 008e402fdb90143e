"""How ranks know that they compute the same step."""


class StepNumbers:
    """The step that a rank is in: steps are counted from each scheduler's first one, because all ranks get the same.

    A word of 64 bits has the scheduler's incarnation above the number, so words grow: a rank that sees a larger
    incarnation than its own in another rank's word knows that the scheduler of its step is dead, and that not all
    ranks may have got the step.
    """

    def __init__(self) -> None:
        self.incarnation = self.number = 0
        self.step_id = 0
        """The scheduler's name for the step, for messages."""

    def announce(self, incarnation: int) -> int:
        """A new scheduler has no steps yet. Returns the word of that."""
        self.incarnation, self.number = incarnation, 0
        return self.word_of(0)

    def begin(self, incarnation: int, step_id: int) -> int:
        """The next step. Returns its word."""
        if incarnation != self.incarnation:
            self.announce(incarnation)
        self.number += 1
        self.step_id = step_id
        return self.word_of(self.number)

    def word_of(self, number: int) -> int:
        """The word of a step of the present scheduler."""
        return self.incarnation << 32 | number
