"""What the engine answers instead of doing it; each error knows its HTTP status and its word for programs."""

from __future__ import annotations

__all__ = [
    "Absent",
    "Corrupt",
    "EngineError",
    "Full",
    "NoSuchBranch",
    "NoSuchBranchKey",
    "NoSuchSnapshot",
    "Refused",
    "StaleVersion",
    "StillReferenced",
    "TooLarge",
]


class EngineError(Exception):
    """Base. `status`: HTTP; `word`: short, stable, for programs (the class's name); the text is for people."""

    status = 500

    @property
    def word(self) -> str:
        return type(self).__name__


class Full(EngineError):
    """No room for it now. `retry`: it passes by itself (503), else somebody has to make room (507)."""

    def __init__(self, text: str, *, retry: bool = False) -> None:
        super().__init__(text)
        self.retry = retry
        self.status = 503 if retry else 507


class TooLarge(EngineError):
    """The value can never be stored with these settings."""

    status = 413


class Refused(EngineError):
    """The request makes no sense as it stands (an empty key, a version that is already retired, ...)."""

    status = 400


class StaleVersion(Refused):
    """The tenant's data version has passed the one of this entry."""

    status = 409


class Absent(EngineError):
    """The key is not there, and the value was only for one that is."""

    status = 404


class Corrupt(EngineError):
    """The bytes on disk are not those that were stored; the block is already removed. `sent`: some left before that,
    all of them good ones: the connection must be cut, so that the client sees a short body.
    """

    def __init__(self, text: str, *, sent: bool = False) -> None:
        super().__init__(text)
        self.sent = sent


class StillReferenced(EngineError):
    """A snapshot with branches."""

    status = 409


class NoSuchSnapshot(EngineError):
    """None of this tenant's."""

    status = 404


class NoSuchBranch(EngineError):
    """None of this tenant's."""

    status = 404


class NoSuchBranchKey(EngineError):
    """Neither the branch nor its snapshot has the key."""

    status = 404
