"""A run's directory: made once, locked by the one process that writes it, opened again by a resume.

::

    runs/<name>/
      config.toml    whole and resolved; a resume reads it back
      manifest.json  seed, versions, code revision, machine, command; a line more for every resume
      incarnation    how often the run was started (checkpoints.incarnation)
      metrics.jsonl  a line a tick (metrics.MetricsWriter)
      episodes/      transcripts, a line a turn, compressed (metrics.Transcript)
      checkpoints/   see checkpoints.py
      report.json    at the end
      lock           held by the process that writes the run; the system releases it when that process ends
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import msgspec

from sparring.errors import ConfigError
from sparring.files import TEMPORARY_PREFIX, FileError, explain, truncate_jsonl, write_atomic

RUNS = Path("runs")
"""Where runs are, below the directory one is in."""
_PACKAGES = ("sparring", "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy", "msgspec")


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start or resume of a run, and the circumstances that its numbers depend on.

    >>> Session.now(device="cpu", threads=2).threads
    2
    """

    started: str
    """UTC, ISO 8601."""
    argv: tuple[str, ...]
    revision: str | None
    """Commit of the code, with ``+`` when files were changed since; None outside a repository."""
    versions: Mapping[str, str]
    """Of Python and of the packages that compute."""
    machine: str
    """Processor and system."""
    cpus: int
    device: str
    threads: int
    """CPU threads that computed."""
    dtype: str

    @classmethod
    def now(cls, *, device: str, threads: int) -> Session:
        """The circumstances of this process."""
        versions = {"python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return cls(
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            argv=tuple(sys.argv),
            revision=code_revision(),
            versions=versions,
            machine=f"{platform.machine()} {platform.system()} {_processor()}".strip(),
            cpus=os.cpu_count() or 1,
            device=device,
            threads=threads,
            dtype="float32" if device == "cpu" else "float32 weights, bfloat16 autocast",
        )

    def differences(self, other: Session) -> tuple[str, ...]:
        """What differs from another session in what bit-for-bit repetition depends on, for people."""
        found = []
        for name in ("machine", "device", "threads", "dtype", "revision"):
            before, after = getattr(self, name), getattr(other, name)
            if before != after:
                found.append(f"{name} was {before}, is {after}")
        for package in sorted({*self.versions, *other.versions} - {"sparring"}):
            before, after = self.versions.get(package, "missing"), other.versions.get(package, "missing")
            if before != after:
                found.append(f"{package} was {before}, is {after}")
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunManifest:
    """``manifest.json``: what a reader needs to repeat the run.

    >>> RunManifest(name="a", seed=0, sessions=()).name
    'a'
    """

    name: str
    seed: int
    sessions: tuple[Session, ...]
    """The start, then every resume."""


class RunDirectory:
    """A run's directory, locked by this process until :meth:`close` (or the end of the process). A context manager.

    Attributes:
        path: The directory.
        notices: After :meth:`open`, how this machine differs from the one that ran before; results may then differ in
            the last bits, and the report says so.
    """

    def __init__(self, path: Path, lock: IO[bytes], notices: tuple[str, ...] = ()) -> None:
        self.path, self._lock, self.notices = path, lock, notices

    @classmethod
    def begin(
        cls, resume: Path | None, *, name: str | None, config_toml: str, seed: int, session: Session, kind: str
    ) -> RunDirectory:
        """A new run, or the one that is resumed. Arguments as of :meth:`create` and :meth:`open`."""
        if resume is not None:
            return cls.open(resume, session=session)
        return cls.create(name, config_toml=config_toml, seed=seed, session=session, kind=kind)

    @classmethod
    def create(
        cls, name: str | None, *, config_toml: str, seed: int, session: Session, kind: str = "run", root: Path = RUNS
    ) -> RunDirectory:
        """Make ``root/name`` and lock it.

        Args:
            name: None makes one from ``kind`` and the time.
            config_toml: ``to_toml`` of the configuration.
            seed: Of the run.
            session: Circumstances of this start.
            kind: Begins a name that is made here, e.g. ``shared``.
            root: Where runs are.

        Raises:
            ConfigError: The run exists, or the place cannot be written.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _make(root, name, kind)
            lock = _locked(path)
            (path / "episodes").mkdir(exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            _write_manifest(path, RunManifest(name=path.name, seed=seed, sessions=(session,)))
            write_atomic(path / "config.toml", config_toml.encode())  # last: with it the directory is a run
        except OSError as error:
            raise ConfigError(f"cannot make the run's directory in {root}: {explain(error)}") from error
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path, *, session: Session, config_toml: str | None = None) -> RunDirectory:
        """Lock a run's directory to continue it, and enter the resume into its manifest.

        Args:
            path: The directory; see :func:`find_run`.
            session: Circumstances of this resume.
            config_toml: The configuration from here on, where it changed.

        Raises:
            ConfigError: It is no run, or another process writes it.
        """
        lock = _locked(path)
        manifest = read_run_manifest(path)
        notices = manifest.sessions[-1].differences(session) if manifest.sessions else ()
        if config_toml is not None:
            write_atomic(path / "config.toml", config_toml.encode())
        sessions = (*manifest.sessions, session)
        _write_manifest(path, RunManifest(name=manifest.name, seed=manifest.seed, sessions=sessions))
        return cls(path, lock, notices)

    def write_config(self, config_toml: str) -> None:
        """Replace ``config.toml``, once a changed configuration has proved to fit the run's checkpoint.

        Raises:
            FileError: It cannot be written.
        """
        write_atomic(self.path / "config.toml", config_toml.encode())

    @property
    def metrics(self) -> Path:
        """``metrics.jsonl``."""
        return self.path / "metrics.jsonl"

    @property
    def episodes(self) -> Path:
        """Directory of the transcripts."""
        return self.path / "episodes"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    def cut_back(self, tick: int) -> None:
        """Cut metrics and transcripts back to a tick of the loop, as a resume from its checkpoint needs.

        Raises:
            FileError: A file is damaged or cannot be written.
        """
        (self.path / "report.json").unlink(missing_ok=True)
        truncate_jsonl(self.metrics, tick)
        for transcript in sorted(self.episodes.glob("*.jsonl.zst")):
            if truncate_jsonl(transcript, tick) == 0:
                transcript.unlink()

    def write_report(self, report: object) -> Path:
        """Write ``report.json``: a dataclass, a struct or a mapping; numbers that are not finite become null.

        Raises:
            FileError: It cannot be written.
        """
        path = self.path / "report.json"
        write_atomic(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        return path

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_run(name: str | Path, *, root: Path = RUNS) -> Path:
    """The directory of a run, by its path or its name under ``runs/``.

    Raises:
        ConfigError: There is none; the message names those there are.
    """
    for path in (Path(name), root / name):
        if (path / "config.toml").is_file():
            return path
    there = sorted(path.parent.name for path in root.glob("*/config.toml"))
    known = f"; in {root}/ there are: {', '.join(there[-8:])}" if there else f"; {root}/ holds no runs"
    raise ConfigError(f"no run {str(name)!r} (no config.toml){known}")


def read_run_manifest(path: Path) -> RunManifest:
    """``manifest.json`` of a run.

    Raises:
        ConfigError: It is missing or damaged.
    """
    file = path / "manifest.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunManifest)
    except OSError as error:
        raise ConfigError(f"{path} is no run: cannot read {file} ({explain(error)})") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error


def code_revision() -> str | None:
    """Commit of the repository that this code runs from, ``+`` appended when its files were changed; None without."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        # A commit of some other repository that .venv lies in would mislead: this file must be one of its own.
        if head is None or _git(here, "ls-files", "--error-unmatch", "rundir.py") is None:
            return None
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(directory: Path, *words: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    """Model of the processor: another one may compute other last bits."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


_MADE_FIRST = ("lock", "episodes", "checkpoints", "manifest.json")


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY_PREFIX)


def _make(root: Path, name: str | None, kind: str) -> Path:
    if name is not None:
        try:
            (root / name).mkdir()
        except FileExistsError:
            # What a kill in the middle of `create` left behind is taken over.
            if any(place.name not in _MADE_FIRST for place in (root / name).iterdir() if not _is_temporary(place)):
                raise ConfigError(
                    f"run {name!r} exists in {root}/: choose another name, or continue it with --resume {name}"
                ) from None
        return root / name
    stamp = f"{kind}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        path = root / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise ConfigError(f"{root}/ is full of runs called {stamp}: give a name with --run")


def _locked(path: Path) -> IO[bytes]:
    try:
        lock = (path / "lock").open("ab")
    except OSError as error:
        raise ConfigError(f"{path} is no run that can be written: {explain(error)}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        holder = (path / "lock").read_text(errors="replace").strip() or "another process"
        raise ConfigError(f"{path} is being written by {holder}: wait for it, or stop it") from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n".encode())
    lock.flush()
    return lock


def _write_manifest(path: Path, manifest: RunManifest) -> None:
    try:
        write_atomic(path / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    except FileError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM end the run after the tick (or iteration), with a checkpoint; a second SIGINT ends it at once."""
    asked = False

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: the caller's program has the signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
