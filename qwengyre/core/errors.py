"""Every error of QwenGyre, one type per boundary crossed.

    QwenGyreError
    ├── ConfigError            a run file, task folder or workload that cannot be used: file, key, line, what to do
    ├── IllegalTransition      a state machine was told something its table lacks
    ├── InvariantViolated      our own bug: a rule of docs/scheduler.md does not hold after an event
    ├── RecordError            token records that disagree with themselves
    │   ├── TokenCountMismatch
    │   ├── CallOutOfOrder     events of one call that contradict each other, or a base that does not exist
    ├── JournalError           a journal that cannot be read or written
    │   ├── JournalCorrupt
    │   ├── JournalFull
    │   └── JournalInUse
    ├── EngineError            an engine refused or lost a request
    │   ├── ContextOverflow
    │   ├── EngineUnavailable
    │   ├── ModelRefused
    │   └── KVRefused
    ├── ExecutionClosed        a call's execution was closed while the call was waiting: not a failure of ours
    ├── TransferError          a one-sided read that must not be used
    │   └── StaleRead
    ├── TrainerError           a model, row or step that cannot be trained
    │   ├── UnsupportedModel
    │   ├── PathTooLong
    │   ├── NonFiniteLoss
    │   └── MembershipBroken
    ├── SandboxError           isolation that cannot be given
    │   ├── WorkspaceRefused   a harness left more than can be scored
    │   ├── HarnessLost        a process of ours that a harness needs died
    │   └── ImageError         a container image that cannot be had, or used
    ├── EvaluatorFailed        the evaluator crashed: not a score of 0
    ├── HookFailed             Python of the user's own raised, or returned what cannot be used: hook, file and line
    ├── WarmupFailed           the process that makes the policy to start from ended badly
    │   └── PolicyNotReady
    ├── WireError              two processes of a run that did not understand one another (`rpc/`)
    │   ├── Unreachable        nobody answers there, or the reply did not come in time
    │   └── MessageTooLarge
    ├── ProcessFailed          a process of ours did not come up
    ├── NoRoom                 the cluster has no place for a process now
    ├── ProcessGaveUp          a process of ours is lost again and again
    ├── GatewayFailed          the gateway refused a request, or was away longer than the deadline
    ├── UnknownExecution       the gateway was asked for an execution that nobody opened
    └── CellFailed             a cell died, stalled, or answered from another incarnation

Each of them crosses from process to process by `rpc/refusal.py`: it arrives with its type, its message and its fields.
A failed execution is data (`core.records.Outcome`), never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwengyre.core.text import one_line


class QwenGyreError(Exception):
    """Base of every error that a user may meet. `str(error)` is a sentence that says what to do."""


class ConfigError(QwenGyreError):
    """Something the user wrote cannot be used. `of_all` makes one of several: its fields are those of the first."""

    def __init__(self, message: str, *, file: str | None = None, key: str | None = None, line: int | None = None):
        self.message, self.file, self.key, self.line = message, file, key, line
        self.mistakes: tuple[ConfigError, ...] = ()
        """All of them, where there are several."""
        where = ":".join(one_line(str(part)) for part in (file, line) if part is not None)
        text = f"{key}: {message}" if key else message
        super().__init__(f"{where}: {text}" if where else text)

    @classmethod
    def of_all(cls, mistakes: Sequence[ConfigError]) -> ConfigError:
        first, *others = mistakes
        if not others:
            return first
        error = cls(first.message, file=first.file, key=first.key, line=first.line)
        error.args, error.mistakes = ("\n".join(map(str, mistakes)),), tuple(mistakes)
        return error


class IllegalTransition(QwenGyreError):
    def __init__(self, who: str, state: object, event: object):
        self.who, self.state, self.event = who, state, event
        super().__init__(f"{who} is {state} and cannot take {event}")


class InvariantViolated(QwenGyreError):
    """Raised by `validate()` only. Carries the last events so that the story is in the message."""

    def __init__(self, rule: str, detail: str, story: tuple[object, ...] = ()):
        self.rule, self.detail, self.story = rule, detail, story
        super().__init__(f"{rule}: {detail}" + "".join(f"\n  after {event}" for event in story))


class RecordError(QwenGyreError):
    pass


class TokenCountMismatch(RecordError):
    def __init__(self, call_id: str, *, num_tokens: int, num_logprobs: int):
        self.call_id, self.num_tokens, self.num_logprobs = call_id, num_tokens, num_logprobs
        super().__init__(f"call {call_id}: {num_tokens} tokens but {num_logprobs} log-probs")


class CallOutOfOrder(RecordError):
    def __init__(self, call_id: str, reason: str):
        self.call_id, self.reason = call_id, reason
        super().__init__(f"call {call_id}: {reason}")


class JournalError(QwenGyreError):
    pass


class JournalCorrupt(JournalError):
    def __init__(self, path: str, *, offset: int, reason: str):
        self.path, self.offset, self.reason = path, offset, reason
        super().__init__(f"{path}: unreadable at byte {offset}: {reason}")


class JournalFull(JournalError):
    """The disk refused a record. The journal ends with the record before it and can be resumed."""

    def __init__(self, path: str, *, num_bytes: int, reason: str):
        self.path, self.num_bytes, self.reason = path, num_bytes, reason
        super().__init__(
            f"{path}: no room for {num_bytes} more bytes ({reason}). Nothing recorded is lost: "
            "free some space, then go on with `qwengyre train --resume RUN`"
        )


class JournalInUse(JournalError):
    def __init__(self, path: str):
        self.path = path
        super().__init__(f"{path}: another process is writing this journal. Is the run still going? Stop it before resuming")


class EngineError(QwenGyreError):
    pass


class ContextOverflow(EngineError):
    def __init__(self, *, num_tokens: int, max_tokens: int):
        self.num_tokens, self.max_tokens = num_tokens, max_tokens
        super().__init__(f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum")


class EngineUnavailable(EngineError):
    """The server is gone, leaving or offloaded: the caller holds the call and continues elsewhere."""


class ModelRefused(EngineError):
    """A config or weights that the engine does not know how to serve."""


class KVRefused(EngineError):
    """A KV cache of another model, version, dtype or layout: recompute from tokens instead."""


class ExecutionClosed(QwenGyreError):
    """The execution of this call was closed while it was waiting for its answer."""


class TransferError(QwenGyreError):
    pass


class StaleRead(TransferError):
    """What was read belongs to another version or incarnation, or was released: throw the bytes away."""


class TrainerError(QwenGyreError):
    pass


class UnsupportedModel(TrainerError):
    """A model that would be trained silently wrong, refused before the first step."""

    def __init__(self, model: str, reason: str):
        self.model, self.reason = model, reason
        super().__init__(f"{model} cannot be trained over trees: {reason}")


class PathTooLong(TrainerError):
    """More distinct tokens than a row may have: a single path, since packing cuts trees between paths."""

    def __init__(self, model: str, *, execution: str, path: int, num_tokens: int, max_tokens: int):
        self.model, self.execution, self.path, self.num_tokens, self.max_tokens = model, execution, path, num_tokens, max_tokens
        super().__init__(
            f"{model}, execution {execution}, path {path}: its micro-step has {num_tokens} distinct tokens, more than"
            f" trainer.max_row_tokens = {max_tokens}; raise that, or lower policy.max_context_tokens"
        )


class NonFiniteLoss(TrainerError):
    """The step that holds it is not applied."""

    def __init__(self, model: str, *, execution: str, path: int, what: str):
        self.model, self.execution, self.path, self.what = model, execution, path, what
        super().__init__(f"{model}, execution {execution}, path {path}: {what}; the step will not be applied")


class MembershipBroken(TrainerError):
    """A sum over cells did not happen: somebody is gone or late. Own sums are unharmed; connect again as a new membership."""

    def __init__(self, *, rank: int, membership: int, num_members: int, reason: str):
        self.rank, self.membership, self.num_members, self.reason = rank, membership, num_members, reason
        super().__init__(f"membership {membership}, seen by rank {rank}: {num_members} cells did not come together: {reason}")


class SandboxError(QwenGyreError):
    pass


class LimitsRefused(SandboxError):
    """The kernel cannot be made to hold an execution to its limits here, and nobody said to go on without."""


class WorkspaceRefused(SandboxError):
    """What a harness left is too much to be scored."""


class HarnessLost(SandboxError):
    """A process of ours that a harness needs died: what the harness did counts for nothing, and its execution is dispatched again."""


class ImageError(SandboxError):
    """A container image that cannot be had or used: which one, and why."""


class EvaluatorFailed(QwenGyreError):
    pass


class HookFailed(QwenGyreError):
    """A hook (docs/hooks.md) raised, took too long, or returned what cannot be used."""

    def __init__(self, hook: str, reason: str, *, file: str = "", line: int | None = None):
        """`hook` is its key in the run file; `file` and `line` are where it failed, or where it begins."""
        self.hook, self.reason, self.file, self.line = hook, reason, file, line
        where = ":".join(one_line(str(part)) for part in (file, line) if part)
        super().__init__(f"{where}: {hook}: {reason}" if where else f"{hook}: {reason}")


class WarmupFailed(QwenGyreError):
    def __init__(self, exit_code: int, output: str):
        self.exit_code, self.output = exit_code, output
        super().__init__(f"the warm-up ended with exit code {exit_code}:\n{output}")


class PolicyNotReady(WarmupFailed):
    def __init__(self, skill: str, least: str):
        self.skill, self.least = skill, least
        QwenGyreError.__init__(self, f"the policy {skill}, but needs {least}: raise warmup.max_updates or num_demonstrations")


class WireError(QwenGyreError):
    """A message of another process that cannot be used, or a request that broke off at the other end: its log says why."""


class Unreachable(WireError):
    """Nobody answers at an address, the connection broke, or the reply did not come within the deadline."""

    def __init__(self, address: str, reason: str):
        self.address, self.reason = address, reason
        super().__init__(f"{address}: {reason}")


class MessageTooLarge(WireError):
    """A message above the one bound of every wire. It was not sent, or not read; nothing of it was used."""

    def __init__(self, what: str, *, num_bytes: int, max_bytes: int):
        self.what, self.num_bytes, self.max_bytes = what, num_bytes, max_bytes
        super().__init__(f"{what}: {num_bytes} bytes, and a message can have {max_bytes}")


class ProcessFailed(QwenGyreError):
    """A process of ours did not come up, or ended by itself."""

    def __init__(self, name: str, reason: str, *, log_path: str, tail: str):
        """`tail` is the end of its log, which may be on another machine."""
        self.name, self.reason, self.log_path, self.tail = name, reason, log_path, tail
        super().__init__(f"{name}: {reason}; its log ({log_path}) ends with:\n{tail}")


class NoRoom(QwenGyreError):
    """There is no place for a process now; there may be later."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason
        super().__init__(f"{name}: {reason}")


class ProcessGaveUp(QwenGyreError):
    """A process that is lost again and again: it is broken, and starting it once more mends nothing."""

    def __init__(self, name: str, last_words: str, *, num_losses: int, within_s: float):
        self.name, self.last_words, self.num_losses, self.within_s = name, last_words, num_losses, within_s
        super().__init__(f"{name} was lost {num_losses} times within {within_s:g} s; {last_words}")


class GatewayFailed(QwenGyreError):
    """The gateway refused a request, or was away longer than the deadline."""


class UnknownExecution(QwenGyreError):
    def __init__(self, execution: str):
        self.execution = execution
        super().__init__(f"{execution} was never opened here")


class CellFailed(QwenGyreError):
    def __init__(self, cell: int, reason: str):
        self.cell, self.reason = cell, reason
        super().__init__(f"cell {cell}: {reason}")
