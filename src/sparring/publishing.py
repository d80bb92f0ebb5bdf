"""What a run has published: one pointer that servers follow, and the gate that every candidate must pass first.

::

    runs/<name>/
      published.json       the pointer: version, checkpoint, suite result, what came before; replaced as a whole
      publications.jsonl   a line for every publication, refusal, rollback and repair
      publish.lock         held while the two are changed

The pointer is the truth. It is written only after the checkpoint it names is whole on disk, so a kill at any moment
leaves the old pointer or the new one, and either names weights that are there; the history is brought up to it by the
next call. The gate is closed unless a suite opens it: without a suite result, with one of another checkpoint or of
another panel, or with a figure that is no number, nothing is published.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import blake3
import msgspec

from sparring.checkpoints import checkpoint_step, verify_checkpoint
from sparring.errors import CheckpointError, PublicationError
from sparring.evaluation.statistics import Estimate
from sparring.files import explain, read_jsonl, repair_frames, write_atomic
from sparring.suite_results import SuiteResult, compare, not_worse, shown
from sparring.types import PolicyVersion

POINTER, HISTORY, LOCK = "published.json", "publications.jsonl", "publish.lock"
FORMAT = 1
KEPT = 5
"""Publications whose checkpoints are kept for a rollback (:func:`checkpoints_in_use`)."""


class Kind(StrEnum):
    """Why a line of the history was written."""

    PUBLISHED = "published"
    REFUSED = "refused"
    ROLLED_BACK = "rolled_back"
    REPAIRED = "repaired"
    """The pointer was damaged, or named what is no longer whole; it was set back to the last good publication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """What the pointer holds, and a line of the history.

    >>> Publication(serial=1, kind=Kind.PUBLISHED, version="v1.25", checkpoint="checkpoints/step-000025", manifest="ab",
    ...     suite=None, first=None, previous=None, withdrawn=(), reason="", at=0.0).name
    'policy-v1.25'
    """

    serial: int
    """Counts the pointer's changes, from 1. A refusal has that of the pointer it left alone."""
    kind: Kind
    version: str
    """``str`` of the PolicyVersion of these weights."""
    checkpoint: str
    """Below the run's directory: ``checkpoints/step-000123``."""
    manifest: str
    """BLAKE3 of the checkpoint's ``manifest.json``."""
    suite: SuiteResult | None
    """None only in a line of a refusal."""
    first: SuiteResult | None
    """Of the run's first publication: candidates are held against it too, so that many small losses, each within its
    interval, do not add up."""
    previous: str | None
    """Version that was published before."""
    withdrawn: tuple[str, ...]
    """Versions that a rollback took back: they are published again only by ``rollback --to``."""
    reason: str
    at: float
    """Unix time."""

    @property
    def name(self) -> str:
        """What a server calls these weights."""
        return f"policy-{self.version}"

    @property
    def step(self) -> int:
        """Number of the checkpoint."""
        return checkpoint_step(Path(self.checkpoint)) or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What became of a candidate. A refusal is a result, not an error.

    >>> Decision(published=False, version="v1.3", reason="no suite result", changes={}, publication=None).published
    False
    """

    published: bool
    version: str
    reason: str
    """With the figures, for people."""
    changes: Mapping[str, Estimate]
    """Candidate minus published, by figure, paired by situation, with the 95 % interval."""
    publication: Publication | None
    """What is published now; None where nothing is."""


# Reading


def current(run: Path) -> Publication | None:
    """What the pointer names, verified down to the checkpoint's table of contents; None where nothing was published.

    The files that the table names are verified by whoever reads them (``checkpoints.read_checkpoint``).

    Raises:
        PublicationError: The pointer is damaged, or names a checkpoint that is missing or was changed.
    """
    found = read_pointer(run)
    if found is not None:
        _check(run, found, deep=False)
    return found


def read_pointer(run: Path) -> Publication | None:
    """The pointer, whether or not what it names is there.

    Raises:
        PublicationError: It is damaged or cannot be read.
    """
    path = run / POINTER
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PublicationError(f"cannot read {path}: {explain(error)}") from error
    try:
        raw = msgspec.json.decode(data)
        own_hash = raw.pop("blake3", None) if isinstance(raw, dict) else None
        if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
            raise PublicationError(f"{path} is no pointer of format {FORMAT}: sparring rollback sets it anew")
        found = msgspec.convert(raw, Publication)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise PublicationError(f"{path} is damaged ({error}): sparring rollback sets it anew") from error
    if own_hash != _hash(found):
        raise PublicationError(f"{path} was changed after it was written: sparring rollback sets it anew")
    return found


def history(run: Path) -> list[Publication]:
    """All lines, oldest first. A last line that a kill tore is left out.

    Raises:
        FileError: It is damaged.
        PublicationError: A line is no publication.
    """
    path = run / HISTORY
    if not path.exists():
        return []
    try:
        return [msgspec.convert(dict(row), Publication) for row in read_jsonl(path)]
    except msgspec.ValidationError as error:
        raise PublicationError(f"{path} is damaged: {error}") from error


def last_good(run: Path) -> Publication | None:
    """The newest publication of the history whose checkpoint is whole and that no later rollback took back."""
    withdrawn: set[str] = set()
    seen: set[str] = set()
    for line in reversed(history(run)):
        if line.kind is Kind.REFUSED or line.version in seen:
            continue
        withdrawn.update(line.withdrawn if not seen else ())
        seen.add(line.version)
        if line.version in withdrawn:
            continue
        try:
            _check(run, line, deep=True)
        except PublicationError:
            continue  # whoever asks has already said what is wrong with the newest; older ones may be rotated away
        return line
    return None


def checkpoints_in_use(run: Path) -> frozenset[int]:
    """Steps of the checkpoints of the last publications, for ``checkpoints.rotate``: the published one is among them."""
    steps: dict[int, None] = {}
    newest = read_pointer(run)
    for line in ([newest] if newest is not None else []) + history(run)[::-1]:
        if line.kind is not Kind.REFUSED and len(steps) < KEPT:
            steps[line.step] = None
    return frozenset(steps)


def decided(run: Path, version: PolicyVersion) -> bool:
    """Whether a candidate was published, refused or withdrawn before; a loop that was killed asks it when it resumes."""
    newest = read_pointer(run)
    lines = [*([newest] if newest is not None else []), *history(run)]
    return any(str(version) in (line.version, *line.withdrawn) for line in lines)


# Publishing


def publish(
    run: Path, checkpoint: Path, evaluation: SuiteResult | None, *, version: PolicyVersion,
    baseline: SuiteResult | None = None,
) -> Decision:  # fmt: skip
    """Publish a checkpoint if its quick suite allows it.

    It does where no figure is worse than the published version's, nor than the first one's, beyond the 95 % interval of
    the paired difference. The first publication of a run has nothing to be held against: a loop publishes the weights it
    starts from before it learns.

    Args:
        run: The run's directory.
        checkpoint: ``run/checkpoints/step-000123``, whole and renamed.
        evaluation: Of exactly this checkpoint; None never publishes.
        version: Of these weights.
        baseline: Of the published checkpoint on the candidate's panel, needed where the panel has changed since.

    Returns:
        The decision; refusals are in the history too.

    Raises:
        PublicationError: The checkpoint is not whole or not the run's, or the pointer is damaged (see
            :func:`reconcile`); nothing is changed.
        FileError: The disk is full; the pointer is as it was.
    """
    place = _place(run, checkpoint)
    with _locked(run):
        newest = read_pointer(run)
        _bring_up(run, newest)
        if newest is not None and newest.version == str(version) and newest.checkpoint == place:
            return Decision(published=True, version=str(version), reason="is published", changes={}, publication=newest)
        try:
            _, manifest = verify_checkpoint(checkpoint)
        except CheckpointError as error:
            raise PublicationError(f"not published: {error}") from error
        if newest is not None and baseline is not None and baseline.checkpoint == newest.manifest:
            moved = newest.first is None or newest.first.panel != baseline.panel
            newest = replace(newest, suite=baseline, first=baseline if moved else newest.first)
        reason, changes = _gate(evaluation, manifest, newest, str(version))
        line = Publication(
            serial=newest.serial if newest is not None else 0, kind=Kind.REFUSED, version=str(version), checkpoint=place,
            manifest=manifest, suite=evaluation, first=None, previous=newest.version if newest is not None else None,
            withdrawn=newest.withdrawn if newest is not None else (), reason=reason, at=time.time(),
        )  # fmt: skip
        if reason:
            _append(run, line)
            return Decision(published=False, version=str(version), reason=reason, changes=changes, publication=newest)
        first = newest.first if newest is not None else evaluation
        figures = "; ".join(shown(name, change) for name, change in changes.items()) or "the first of its run"
        line = replace(line, serial=line.serial + 1, kind=Kind.PUBLISHED, first=first, reason=figures)
        _point(run, line)
        return Decision(published=True, version=str(version), reason=figures, changes=changes, publication=line)


def rollback(run: Path, *, to: PolicyVersion | None = None) -> Publication:
    """Publish an earlier version again, whole models and adapters alike; servers follow as they follow any publication.

    All versions that were published after it are withdrawn: no loop publishes them again. ``to`` may also name a
    withdrawn version, which is then no longer withdrawn.

    Args:
        run: The run's directory.
        to: None takes the version before the published one.

    Raises:
        PublicationError: There is no such publication, or its checkpoint is no longer whole.
        FileError: The disk is full; the pointer is as it was.
    """
    with _locked(run):
        try:
            newest = read_pointer(run)
        except PublicationError:
            newest = None  # a damaged pointer is what a rollback cures; the history knows what was published
        _bring_up(run, newest)
        lines = [line for line in history(run) if line.kind is not Kind.REFUSED]
        if newest is None:
            newest = lines[-1] if lines else None
        if newest is None:
            raise PublicationError(f"{run} has published nothing: there is nothing to go back to")
        wanted = str(to) if to is not None else newest.previous
        if wanted is None:
            raise PublicationError(f"{newest.version} is the first publication of {run}: there is none before it")
        found = next((line for line in reversed(lines) if line.version == wanted), None)
        if found is None:
            known = ", ".join(dict.fromkeys(line.version for line in lines))
            raise PublicationError(f"{run} never published {wanted} (published were: {known})")
        _check(run, found, deep=True)
        order = list(dict.fromkeys(line.version for line in lines))
        later = order[order.index(wanted) + 1 :]
        withdrawn = tuple(dict.fromkeys([*newest.withdrawn, *later]))
        before = order[order.index(wanted) - 1] if order.index(wanted) else None
        line = replace(
            found, serial=newest.serial + 1, kind=Kind.ROLLED_BACK, previous=before, at=time.time(),
            withdrawn=tuple(version for version in withdrawn if version != wanted), reason=f"rolled back from {newest.version}",
        )  # fmt: skip
        _point(run, line)
        return line


def reconcile(run: Path) -> tuple[Publication | None, str | None]:
    """What the process that trains a run calls when it starts: pointer, history and disk agree afterwards.

    A kill between the pointer and the history is healed. A pointer that is damaged, or names what is missing or changed,
    is set back to the last good publication.

    Returns:
        What is published, and what had to be repaired, for people (None: nothing).

    Raises:
        PublicationError: The pointer is damaged and no earlier publication is whole either.
    """
    with _locked(run):
        try:
            found = read_pointer(run)
            _bring_up(run, found)
            if found is not None:
                _check(run, found, deep=True)
            return found, None
        except PublicationError as error:
            good = last_good(run)
            if good is None:
                raise PublicationError(f"{error}; no earlier publication is whole either") from error
            serial = max((line.serial for line in history(run)), default=0) + 1
            line = replace(good, serial=serial, kind=Kind.REPAIRED, reason=str(error), at=time.time())
            _point(run, line)
            return line, f"{error}; went back to {line.version}"


# The gate


def _gate(
    evaluation: SuiteResult | None, manifest: str, newest: Publication | None, version: str
) -> tuple[str, Mapping[str, Estimate]]:
    """Why a candidate is refused (empty: it is not), and how its figures differ from the published ones."""
    if newest is not None and version in newest.withdrawn:
        return f"{version} was withdrawn by a rollback: sparring rollback --to {version} publishes it again", {}
    if evaluation is None:
        return "there is no suite result: nothing is published unmeasured", {}
    if evaluation.checkpoint != manifest:
        return "the suite result is of another checkpoint", {}
    if not evaluation.figures or not evaluation.keys:
        return "the suite measured nothing", {}
    for name, figure in evaluation.figures.items():
        if any(len(measure) != len(evaluation.keys) for measure in figure.measures) or not figure.measures:
            return f"{name} has not one measure for each situation", {}
        if not math.isfinite(figure.value):
            return f"{name} is {figure.value}: the suite has no figure there", {}
    if newest is None:
        return "", {}
    changes: dict[str, Estimate] = {}
    worse = []
    for what, other in (("the published version", newest.suite), ("the run's first", newest.first)):
        if other is None or (what != "the published version" and other == newest.suite):
            continue
        if (other.panel, other.keys, set(other.figures)) != (
            evaluation.panel, evaluation.keys, set(evaluation.figures),
        ):  # fmt: skip
            return f"the suite's panel is not that of {what}: measure both on the same panel", changes
        found = compare(evaluation, other)
        changes = changes or found
        for name, change in found.items():
            better = evaluation.figures[name].higher_is_better
            if not not_worse(change, higher_is_better=better):
                worse.append(f"{shown(name, change)} against {what}")
    return ("worse beyond the interval: " + "; ".join(worse) if worse else ""), changes


# Files


def _place(run: Path, checkpoint: Path) -> str:
    """A checkpoint of the run, as the pointer names it.

    Raises:
        PublicationError: It lies elsewhere, is a link, or is not called as a checkpoint is.
    """
    if checkpoint_step(checkpoint) is None or checkpoint.parent.resolve() != (run / "checkpoints").resolve():
        raise PublicationError(f"{checkpoint} is no checkpoint of {run}: publish checkpoints/step-... of the run")
    if checkpoint.is_symlink():
        raise PublicationError(f"{checkpoint} is a link: publish the checkpoint itself")
    return f"checkpoints/{checkpoint.name}"


def _check(run: Path, publication: Publication, *, deep: bool) -> None:
    """Raise PublicationError unless the checkpoint is there and is the one that was published."""
    path = run / publication.checkpoint
    if _place(run, path) != publication.checkpoint:
        raise PublicationError(f"{run / POINTER} names {publication.checkpoint}, which is no checkpoint of the run")
    try:
        if deep:
            _, manifest = verify_checkpoint(path)
        else:
            manifest = blake3.blake3((path / "manifest.json").read_bytes()).hexdigest()
    except (CheckpointError, OSError) as error:
        why = explain(error) if isinstance(error, OSError) else str(error)
        raise PublicationError(f"{publication.version} is published, but its checkpoint is not whole: {why}") from error
    if manifest != publication.manifest:
        raise PublicationError(f"{publication.version} is published, but {path} is another checkpoint than it was then")


def _hash(publication: Publication) -> str:
    return blake3.blake3(msgspec.json.encode(publication, order="deterministic")).hexdigest()


def _point(run: Path, line: Publication) -> None:
    """The pointer first: it is the truth. A kill before the history's line is healed by :func:`_bring_up`."""
    content = {"format": FORMAT, **msgspec.to_builtins(line), "blake3": _hash(line)}
    write_atomic(run / POINTER, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    _append(run, line)


def _bring_up(run: Path, pointer: Publication | None) -> None:
    """The history's line of the pointer, where a kill came between."""
    if pointer is None:
        return
    known = max((line.serial for line in history(run) if line.kind is not Kind.REFUSED), default=0)
    if known < pointer.serial:
        _append(run, pointer)


def _append(run: Path, line: Publication) -> None:
    path = run / HISTORY
    repair_frames(path)  # cuts a torn last line, too
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise PublicationError(f"cannot write {path}: {explain(error)}") from error


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """One at a time: a loop publishes while a person rolls back."""
    try:
        lock = (run / LOCK).open("ab")
    except OSError as error:
        raise PublicationError(f"{run} cannot be written: {explain(error)}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Following


class Follower:
    """Notices when a run publishes something else; what a server asks a few times a second.

    Args:
        run: Its directory.

    Attributes:
        trouble: Why the newest publication cannot be served; what was served before goes on. None: nothing is wrong.
    """

    RETRY_SECONDS = 2.0

    def __init__(self, run: Path) -> None:
        self.run = run
        self.trouble: str | None = None
        self.serial = 0
        self._seen: tuple[int, int] | None = None
        self._again = 0.0

    def poll(self) -> Publication | None:
        """The publication to serve from now on, or None where nothing has changed.

        Call :meth:`serving` when its weights are loaded, or :meth:`failed`: then it is given again a little later.
        """
        try:
            stat = (self.run / POINTER).stat()
        except OSError:
            return None
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen == self._seen and (self.trouble is None or time.monotonic() < self._again):
            return None
        self._seen = seen
        try:
            found = current(self.run)
        except PublicationError as error:
            self.failed(str(error))
            return None
        return found if found is not None and found.serial != self.serial else None

    def serving(self, publication: Publication) -> None:
        """It is served now."""
        self.serial, self.trouble = publication.serial, None

    def failed(self, why: str) -> None:
        """It cannot be served; it is tried again after a while."""
        self.trouble, self._again = why, time.monotonic() + self.RETRY_SECONDS
