"""What a run says when it cannot go on: one family of errors, each with an exit code."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.secrets import masked

USER_MUST_ACT = 2
CHECK_SAID_NO = 3
RUN_FAILED = 1


class FinetuneError(Exception):
    """A failure told to the person at the keyboard: no traceback unless `--debug`."""

    exit_code = RUN_FAILED

    def __str__(self) -> str:
        return masked(super().__str__())  # messages of libraries are part of it

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it below a cell."""
        return [f"{type(self).__name__}: {self}"]


def is_ours(told: str) -> bool:
    """Whether the words of a failure are those of such an error: any other leaves its traceback."""
    return "Traceback (most recent call last)" not in told


class UserError(FinetuneError):
    """The user must change something (config, data, machine) before the run can start."""

    exit_code = USER_MUST_ACT


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: `key=value` (where), why it cannot be, and what to do instead."""

    where: str
    """The key with its value (`trainer.max_steps=x`), or a file with its line."""
    why: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"  {self.where}: {self.why}" if self.why else f"  {self.where}"
        return f"{text}\n      {self.fix}" if self.fix else text


class Refusal(UserError):
    """All problems of a config, a data set or a machine at once."""

    def __init__(self, problems: list[Problem], subject: str) -> None:
        self.problems = problems
        self.subject = subject
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in {subject}:", *map(str, problems)]))

    def __reduce__(self) -> tuple[type[Refusal], tuple[list[Problem], str]]:
        return type(self), (
            self.problems,
            self.subject,
        )  # a process that prepares data sends it to its parent


class DoesNotFit(Refusal):
    """The plan says that the run does not fit on this machine."""

    exit_code = CHECK_SAID_NO


def refuse(where: str, why: str, fix: str = "", *, subject: str) -> Refusal:
    """Build the refusal for a single problem; the caller raises it."""
    return Refusal([Problem(where, why, fix)], subject)


class RunFailed(FinetuneError):
    """A run that had started could not be finished."""

    def __init__(self, message: str, exit_code: int = RUN_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
