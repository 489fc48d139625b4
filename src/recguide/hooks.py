"""Observers of a request's path.

Order: hooks are called in the order of the list, for each event in the order of events. Exceptions: a hook's exception
is not swallowed; the later hooks of that event are not called, the requests end with reason `error`, their state is
released, and the exception reaches the caller; in an engine it is in the results of the requests whose forward it was, and one
raised by `on_finish` is logged. `on_finish` is called once for each request of a batch when the batch has
ended, also when the generation failed; if it raises itself while another exception is under way, it is chained to that one.
"""

from __future__ import annotations

from collections.abc import Sequence

from .structs import FinishRecord, ForwardRecord, RoundRecord


class Hook:
    """Base of observers: override what you need. Hooks must not change what they are given (the records are frozen)."""

    def on_prefill(self, record: ForwardRecord) -> None:
        """After the prompts' forward."""

    def on_draft(self, record: ForwardRecord) -> None:
        """After each draft forward."""

    def on_verify(self, record: ForwardRecord) -> None:
        """After each verifying forward, fused with branches or not."""

    def on_commit(self, record: RoundRecord) -> None:
        """After each request's round, once its committed tokens are known."""

    def on_finish(self, record: FinishRecord) -> None:
        """For each request, when its batch has ended."""


class Hooks(Hook):
    """Several hooks as one."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self.hooks = tuple(hooks)

    def on_prefill(self, record: ForwardRecord) -> None:
        for hook in self.hooks:
            hook.on_prefill(record)

    def on_draft(self, record: ForwardRecord) -> None:
        for hook in self.hooks:
            hook.on_draft(record)

    def on_verify(self, record: ForwardRecord) -> None:
        for hook in self.hooks:
            hook.on_verify(record)

    def on_commit(self, record: RoundRecord) -> None:
        for hook in self.hooks:
            hook.on_commit(record)

    def on_finish(self, record: FinishRecord) -> None:
        for hook in self.hooks:
            hook.on_finish(record)
