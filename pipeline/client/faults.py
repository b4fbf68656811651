"""What can become of one request that brought no usable answer."""

from __future__ import annotations

from pipeline.records import FailureKind


class RequestFault(Exception):
    """One attempt failed.

    ``kind`` is what the prompt's failure record will say if no later attempt succeeds; ``permanent`` faults are not
    tried again; ``connection`` ones broke on the way, which the engine's end does too. ``engine_lost`` is set where
    it turned out that the engine had ended: not the prompt's fault, and not counted as one of its attempts.
    """

    def __init__(self, kind: FailureKind, detail: str, permanent: bool = False, connection: bool = False) -> None:
        self.kind: FailureKind = kind
        self.detail = " ".join(detail.split())[:500]
        self.permanent = permanent
        self.connection = connection
        self.engine_lost = False
        super().__init__(f"{kind}: {self.detail}")


def bad_answer(detail: str) -> RequestFault:
    """An answer that breaks an invariant; another attempt may bring a whole one."""
    return RequestFault("bad_answer", detail)
