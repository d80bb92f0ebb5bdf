"""Which weights a run serves: one file, ``published.json``, replaced as a whole; servers follow it.

A candidate is published only if a suite says that it is not worse than what is served, beyond the suite's interval. No
result, no publication. A version that was rolled back stays withdrawn until somebody names it.

The file is the only state: a trainer that is killed after its checkpoint and before its publication evaluates and
publishes again when it is back; a server that is killed reads the file when it is back.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from sparring.checkpoints import verify_checkpoint
from sparring.errors import CheckpointError, ConfigError, SparringError
from sparring.files import FileError, write_atomic

FILE = "published.json"
HISTORY = 20
"""Publications that are remembered."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the candidate minus that of what is served, with its interval."""

    value: float
    low: float
    high: float
    n: int
    higher_is_better: bool = True

    @property
    def worse(self) -> bool:
        """Beyond the interval, or no number at all."""
        if not all(map(math.isfinite, (self.value, self.low, self.high))) or self.n < 1:
            return True
        return self.high < 0.0 if self.higher_is_better else self.low > 0.0


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a suite found; the figures that guard publication, by name."""

    suite: str
    against: str | None
    """Version that it was compared with; None for the first, which is compared with nothing."""
    changes: dict[str, Change]


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are, or were, served."""

    version: str
    checkpoint: str
    """From the run's directory."""
    suite: SuiteResult | None
    """None only where somebody published by hand."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """``published.json``."""

    current: Publication
    sequence: int = 1
    """Grows with every change, rollbacks too."""
    past: list[Publication] = []
    """Newest first."""
    withdrawn: list[str] = []
    """Versions that were rolled back."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a candidate."""

    published: bool
    reason: str


def current(run: Path) -> Published | None:
    """What a run serves; None before the first publication.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = run / FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Published)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): publish again, or restore it from a copy") from error


def publish(run: Path, *, version: str, checkpoint: Path, suite: SuiteResult | None) -> Decision:
    """Publish a candidate, or say why not.

    Args:
        version: Of its weights.
        checkpoint: Renamed into place and whole: its hashes are checked.
        suite: What the suite found; None is no result, and refused.

    Raises:
        CheckpointError: The checkpoint is not whole, or ``published.json`` is damaged.
        FileError: It cannot be written.
    """
    now = current(run)
    if now is not None and now.current.version == version:
        return Decision(published=True, reason="served already")
    if now is not None and version in now.withdrawn:
        return Decision(
            published=False, reason=f"{version} was rolled back; name it in `sparring rollback --to` to serve it"
        )
    if suite is None:
        return Decision(published=False, reason="no result of the suite: nothing is published without one")
    if now is not None and suite.against != now.current.version:
        return Decision(
            published=False, reason=f"the suite compared with {suite.against}, but {now.current.version} is served now"
        )
    if now is not None and not suite.changes:
        return Decision(published=False, reason="the suite has no figure")
    worse = [name for name, change in suite.changes.items() if change.worse]
    if worse:
        told = ", ".join(_told(name, suite.changes[name]) for name in worse)
        return Decision(published=False, reason=f"worse than {suite.against} beyond the interval: {told}")
    verify_checkpoint(checkpoint)
    made = Publication(version=version, checkpoint=str(checkpoint.relative_to(run)), suite=suite)
    if now is None:
        _write(run, Published(current=made))
    else:
        _write(run, Published(
            current=made, sequence=now.sequence + 1, past=[now.current, *now.past][:HISTORY], withdrawn=now.withdrawn
        ))  # fmt: skip
    return Decision(published=True, reason="not worse than what was served" if now is not None else "the first")


def rollback(run: Path, to: str | None = None) -> Published:
    """Serve an earlier version again (the one before, unless one is named), and withdraw the present one.

    Raises:
        ConfigError: Nothing was published, or there is no such version.
        CheckpointError: Its checkpoint is gone or damaged.
    """
    now = current(run)
    if now is None:
        raise ConfigError(f"{run}: nothing was published yet")
    choices = [one for one in now.past if one.version != now.current.version]
    wanted = next((one for one in choices if to is None or one.version == to), None)
    if wanted is None:
        known = ", ".join(one.version for one in choices) or "none"
        raise ConfigError(f"to: {run} has served no other version {to or ''} that is remembered (there are: {known})")
    verify_checkpoint(run / wanted.checkpoint)
    after = Published(
        current=wanted, sequence=now.sequence + 1, past=[now.current, *[p for p in now.past if p != wanted]][:HISTORY],
        withdrawn=[*[v for v in now.withdrawn if v != wanted.version], now.current.version],
    )  # fmt: skip
    _write(run, after)
    return after


def checkpoints_in_use(run: Path, *, remembered: int = 2) -> set[int]:
    """Steps of the checkpoints that are served or that a rollback would take; rotation must leave them."""
    now = current(run)
    if now is None:
        return set()
    names = [now.current.checkpoint, *(one.checkpoint for one in now.past[:remembered])]
    return {int(name.rpartition("-")[2]) for name in names}


def _write(run: Path, published: Published) -> None:
    write_atomic(run / FILE, msgspec.json.format(msgspec.json.encode(published), indent=2) + b"\n")


def _told(name: str, change: Change) -> str:
    return f"{name} {change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f}, n = {change.n})"


class Follower:
    """Notices when a run publishes something else.

    Args:
        run: Its directory.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._seen: tuple[int, int] | None = None
        self._sequence = 0
        self.trouble: str | None = None
        """Why the newest publication could not be read; the one before goes on being served."""

    def poll(self) -> Publication | None:
        """The publication to serve from now on, or None where nothing has changed."""
        path = self.run / FILE
        try:
            stat = path.stat()
        except OSError:
            return None
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            found = current(self.run)
            if found is None or found.sequence == self._sequence:
                return None
            verify_checkpoint(self.run / found.current.checkpoint)
        except (SparringError, FileError) as error:
            self.trouble = str(error)
            return None
        self._sequence, self.trouble = found.sequence, None
        return found.current
