"""What a run shows of itself: a line a tick for machines, a table for people, transcripts, and alarms of collapse.

All but the transcripts is made from ``TickReport`` and ``EpisodeReport`` alone. Names in ``metrics.jsonl`` are flat,
and TRL's where it has one (``loss``, ``grad_norm``, ``entropy``, ``kl``, ``completion_length``); what belongs to a team
or a policy carries its name after a slash (``reward_mean/blue``, ``loss/shared``).
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING

import msgspec

from sparring.errors import ConfigError
from sparring.files import FileError, compress_frame, explain, read_jsonl, repair_frames
from sparring.types import EpisodeReport, ParseFailure, Settlement, StepReport, TeamReport, TickReport

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

MetricValue = float | str | list[str] | None
"""A number; a reason (``skipped/...``); the alarms; null for a number that was not finite."""


# metrics.jsonl


def metrics_row(report: TickReport, episodes: Sequence[EpisodeReport] = ()) -> dict[str, MetricValue]:
    """One tick as flat figures. Shares are of replies; lengths and rates are in tokens; times in seconds.

    A figure that has nothing behind it in this tick (no settled turn, no step) is left out.
    """
    replies = sum(team.replies for team in report.teams)
    row: dict[str, MetricValue] = {
        "tick": report.tick,
        "seconds": report.seconds,
        "sampling_seconds": report.sampling_seconds,
        "sampled_tokens": report.sampled_tokens,
        "prompt_tokens": report.prompt_tokens,
        "tokens_per_second": tokens_per_second([report]),
    }
    settled = sum(team.settled for team in report.teams if team.reward_mean is not None)
    if settled:
        row["reward_mean"] = sum((team.reward_mean or 0.0) * team.settled for team in report.teams) / settled
    if replies:
        row["completion_length"] = sum(team.reply_tokens for team in report.teams) / replies
        row["valid_share"] = sum(team.valid_replies for team in report.teams) / replies
    for team in report.teams:
        row.update(_team_figures(team))
    row.update(_step_figures(report.steps))
    if episodes:
        row["episodes_ended"] = len(episodes)
        for name in sorted({name for episode in episodes for name in episode.figures}):
            row[f"episode/{name}"] = fmean(each.figures[name] for each in episodes if name in each.figures)
    row["alarms"] = list(report.alarms)
    return row


def _team_figures(team: TeamReport) -> dict[str, MetricValue]:
    row: dict[str, MetricValue] = {"replies": team.replies, "settled": team.settled, "kept_replies": team.kept_replies}
    if team.reward_mean is not None:
        row["reward_mean"] = team.reward_mean
    for part, value in team.reward_parts.items():
        row[f"reward_part/{part}"] = value
    if team.replies:
        row["valid_share"] = team.valid_replies / team.replies
        row["completion_length"] = team.reply_tokens / team.replies
    if team.action_counts:
        row["action_entropy"] = entropy(team.action_counts)
    for action, count in sorted(team.action_counts.items()):
        row[f"actions/{action}"] = count
    return {f"{name}/{team.team}": value for name, value in row.items()}


def _step_figures(steps: Sequence[StepReport]) -> dict[str, MetricValue]:
    """Of each policy, and over all policies that made a step: means weighted by eligible tokens."""
    row: dict[str, MetricValue] = {}
    totals: dict[str, list[tuple[float, int]]] = {}
    for step in steps:
        own: dict[str, MetricValue] = {
            "step": step.version.step,
            "eligible_replies": step.eligible_replies,
            "eligible_tokens": step.eligible_tokens,
            "graded_tokens": step.graded_tokens,
            "forwarded_tokens": step.forwarded_tokens,
            "step_seconds": step.seconds,
        }
        if step.eligible_tokens:
            own["graded_share"] = step.graded_tokens / step.eligible_tokens
        if step.skipped is not None:
            own["skipped"] = step.skipped.value
        else:
            means = {
                "loss": step.loss,
                "grad_norm": step.grad_norm,
                "entropy": step.entropy,
                "mean_ratio": step.mean_ratio,
                "max_ratio": step.max_ratio,
                "version_lag": step.mean_version_lag,
            }
            if step.kl_to_reference is not None:
                means["kl"] = step.kl_to_reference
            own.update(means)
            for name, value in means.items():
                totals.setdefault(name, []).append((value, max(step.eligible_tokens, 1)))
        row.update({f"{name}/{step.policy}": value for name, value in own.items()})
    for name, values in totals.items():
        row[name] = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    return row


class MetricsWriter:
    """Appends one JSON line a tick to ``metrics.jsonl``, and flushes it. A context manager.

    Cut the file back with ``truncate_jsonl`` before a resume appends to it.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            FileError: The file cannot be opened.
        """
        self.path = path
        try:
            self._file: IO[bytes] = path.open("ab")
        except OSError as error:
            raise FileError(f"cannot write {path}: {explain(error)}") from error

    def write(self, report: TickReport, episodes: Sequence[EpisodeReport] = ()) -> None:
        """Append a tick, with the episodes that ended in it.

        Raises:
            FileError: The disk is full, for example.
        """
        self.write_row(metrics_row(report, episodes))

    def write_row(self, row: Mapping[str, MetricValue]) -> None:
        """Append a row of another loop's. Raises FileError as :meth:`write` does."""
        try:
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._file.flush()
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {explain(error)}") from error

    def sync(self) -> None:
        """Force what was written to disk: before a checkpoint that stands for it is renamed into place."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, MetricValue]]:
    """The rows of a ``metrics.jsonl`` (or of the run's directory it is in); a torn last line is left out.

    Raises:
        FileError: It cannot be read, or a line before the last is damaged.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    rows = []
    for row in read_jsonl(file):
        try:
            rows.append(msgspec.convert(row, dict[str, MetricValue]))
        except msgspec.ValidationError as error:
            raise FileError(f"{file}: a line holds other things than figures ({error})") from error
    return rows


# Transcripts


class Transcript:
    """Writes ``episodes/000012.jsonl.zst``: one JSON line a settled turn, one file an episode.

    Lines wait in memory until :meth:`flush` writes them as a zstd frame of their own: what was flushed can be read
    after a kill, by ``files.read_jsonl`` or any zstd tool. Call it once a tick.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines: dict[int, list[bytes]] = {}
        self._opened: set[int] = set()
        self._written: set[Path] = set()

    def write(self, settlement: Settlement, *, tick: int, reply: str, prompt: str | None = None) -> None:
        """Add a turn.

        Args:
            settlement: The turn, its outcome and its reward.
            tick: Of the loop, in which it was settled: the one that ``metrics.jsonl`` counts.
            reply: The reply as text, for people.
            prompt: The prompt as text; None leaves it out.
        """
        turn, reward = settlement.turn, settlement.reward
        row: dict[str, object] = {
            "tick": tick,
            "episode": turn.id.episode,
            "env_tick": turn.id.tick,
            "settled_at": settlement.outcome.settled_at,
            "agent": turn.id.agent,
            "team": turn.team,
            "policy": turn.policy,
            "version": str(turn.version),
            "reply": reply,
            "prompt_ids": turn.prompt_ids,
            "reply_ids": turn.reply_ids,
            "surprisal": turn.surprisal,
            "failure": turn.action if isinstance(turn.action, ParseFailure) else None,
            "action": None if isinstance(turn.action, ParseFailure) else turn.action,
            "facts": settlement.outcome.facts,
            "reward": reward.total,
            "reward_parts": reward.parts,
            "violation": reward.violation,
        }
        if prompt is not None:
            row["prompt"] = prompt
        self._lines.setdefault(turn.id.episode, []).append(msgspec.json.encode(row, enc_hook=repr) + b"\n")

    def flush(self) -> None:
        """Append what waits to the files of its episodes.

        Raises:
            FileError: The disk is full, for example.
        """
        for episode, lines in self._lines.items():
            path = self.directory / f"{episode:06d}.jsonl.zst"
            try:
                if episode not in self._opened:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    repair_frames(path)
                    self._opened.add(episode)
                with path.open("ab") as file:
                    file.write(compress_frame(b"".join(lines)))
            except OSError as error:
                raise FileError(f"cannot write {path}: {explain(error)}") from error
            self._written.add(path)
        self._lines.clear()

    def sync(self) -> None:
        """Force what was flushed to disk: before a checkpoint that stands for it is renamed into place.

        Raises:
            FileError: A file cannot be written.
        """
        for path in sorted(self._written):
            try:
                with path.open("ab") as file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise FileError(f"cannot write {path}: {explain(error)}") from error
        self._written.clear()


# Alarms of collapse


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmSettings:
    """When a window of ticks looks like collapse. Shares are of replies or actions in the window.

    >>> AlarmSettings(min_replies=10).attackers
    ('red',)
    """

    min_replies: int = 100
    """A team with fewer replies in the window raises no alarm."""
    min_entropy: float = 0.25
    """Entropy of a team's actions in nats, below which it does little but one thing (90 % one, 10 % another: 0.33)."""
    attackers: tuple[str, ...] = ("red",)
    """Teams whose attacks are counted."""
    attack_actions: tuple[str, ...] = ("send_message", "group_message", "invite_to_group", "comment", "propose")
    """Actions by which an attacker opens a thread."""
    min_attack_rate: float = 0.02
    """Share of attack actions below which an attacker has given up."""
    max_top_attack_share: float = 0.97
    """Share of one kind among an attacker's attack actions above which attacks are all alike."""
    refusal_actions: tuple[str, ...] = ("refuse", "block", "report", "ignore", "reject")
    """Actions that turn somebody away."""
    max_refusal_share: float = 0.80
    """Share of refusals above which a team refuses everybody (attackers are not watched)."""
    min_valid_share: float = 0.50
    """Share of replies that are read as an action."""
    max_length_change: float = 1.5
    """Factor by which the mean reply may grow or shrink from the first half of the window to the second."""


def collapse_alarms(window: Sequence[TickReport], settings: AlarmSettings | None = None) -> tuple[str, ...]:
    """Alarms that the last ticks of a run give reason for; the same window gives the same alarms.

    Args:
        window: Reports in order of ticks, e.g. of the last 20.
        settings: Thresholds.

    Returns:
        One sentence each, beginning with the team.
    """
    settings = settings or AlarmSettings()
    alarms: list[str] = []
    for name in dict.fromkeys(team.team for report in window for team in report.teams):
        ticks = [team for report in window for team in report.teams if team.team == name]
        if sum(team.replies for team in ticks) >= settings.min_replies:
            alarms += [f"{name}: {text}" for text in _team_alarms(name, ticks, settings)]
    return tuple(alarms)


def _team_alarms(name: str, ticks: Sequence[TeamReport], settings: AlarmSettings) -> list[str]:
    alarms: list[str] = []
    valid_share = sum(team.valid_replies for team in ticks) / sum(team.replies for team in ticks)
    if valid_share < settings.min_valid_share:
        alarms.append(f"only {valid_share:.0%} of replies are valid actions")
    actions: Counter[str] = Counter()
    for team in ticks:
        actions.update(team.action_counts)
    total = sum(actions.values())
    if total >= settings.min_replies:
        nats = entropy(actions)
        if nats < settings.min_entropy:
            top, count = actions.most_common(1)[0]
            alarms.append(f"action entropy is {nats:.2f} nats, {count / total:.0%} of actions are {top}")
        if name in settings.attackers:
            alarms += _attack_alarms(actions, total, settings)
        else:
            refusals = sum(actions[action] for action in settings.refusal_actions) / total
            if refusals > settings.max_refusal_share:
                alarms.append(f"{refusals:.0%} of actions are refusals")
    before, after = _mean_length(ticks[: len(ticks) // 2]), _mean_length(ticks[len(ticks) // 2 :])
    if (
        before
        and after is not None
        and not 1 / settings.max_length_change <= after / before <= (settings.max_length_change)
    ):
        alarms.append(f"mean reply went from {before:.0f} to {after:.0f} tokens")
    return alarms


def _attack_alarms(actions: Counter[str], total: int, settings: AlarmSettings) -> list[str]:
    attacks = {action: actions[action] for action in settings.attack_actions if actions[action]}
    count = sum(attacks.values())
    if count / total < settings.min_attack_rate:
        return [f"attack rate is {count / total:.1%}: it has all but given up"]
    top = max(attacks, key=lambda action: attacks[action])
    if count >= settings.min_replies and attacks[top] / count > settings.max_top_attack_share:
        return [f"{attacks[top] / count:.0%} of attacks are {top}: they are all alike"]
    return []


def _mean_length(ticks: Sequence[TeamReport]) -> float | None:
    replies = sum(team.replies for team in ticks)
    return sum(team.reply_tokens for team in ticks) / replies if replies else None


def entropy(counts: Mapping[str, int]) -> float:
    """Shannon entropy of the frequencies, in nats.

    >>> round(entropy({"wait": 1, "buy": 1}), 4)
    0.6931
    """
    total = sum(counts.values())
    shares = [count / total for count in counts.values() if count > 0]
    return sum(-share * math.log(share) for share in shares)


def tokens_per_second(window: Sequence[TickReport]) -> float:
    """Sampled tokens over the whole time of the ticks, learning included; 0 before any time has passed."""
    seconds = sum(report.seconds for report in window)
    return sum(report.sampled_tokens for report in window) / seconds if seconds > 0 else 0.0


# Live progress


class Progress:
    """Shows a run while it runs, on standard error: a live table on a terminal, now and then a plain line elsewhere.

    >>> with Progress(total=2, quiet=True) as progress:
    ...     progress.note("nothing is shown")
    """

    def __init__(
        self,
        *,
        total: int,
        start: int = 0,
        quiet: bool = False,
        every: int = 10,
        rows: int = 12,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            total: Ticks of the whole run.
            start: Ticks that were done before, where the run was resumed.
            quiet: Show nothing but :meth:`note` lines that begin with ``warning``.
            every: Off a terminal, at most one line in so many ticks (and one for the last tick, and for new alarms).
            rows: Height of the table: the newest ticks.
            stream: Where to; standard error by default.
            clock: For the time that is left.
        """
        if every < 1:
            raise ConfigError(f"every is {every}: give at least 1 tick")
        self.total, self.start, self.quiet, self.every = total, start, quiet, every
        self._stream = stream or sys.stderr
        self._window: deque[TickReport] = deque(maxlen=max(rows, 1))
        self._alarms: tuple[str, ...] = ()
        self._live: Live | None = None
        self._clock = clock
        self._began = clock()

    def __enter__(self) -> Progress:
        self._began = self._clock()
        if not self.quiet and self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, report: TickReport) -> None:
        """Show a tick."""
        self._window.append(report)
        if self.quiet:
            return
        new_alarms = [alarm for alarm in report.alarms if alarm not in self._alarms]
        self._alarms = report.alarms
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif report.tick % self.every == 0 or report.tick == self.total or new_alarms:
            print(self.line(report), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Show a line of its own: a checkpoint, a fallback, an interruption."""
        if self._live is not None:
            from rich.markup import escape

            self._live.console.print(escape(text), highlight=False)
        elif not self.quiet or text.startswith("warning"):
            print(text, file=self._stream, flush=True)

    def line(self, report: TickReport) -> str:
        """A tick as one plain line."""
        cells = [f"tick {report.tick}/{self.total}"]
        cells += [f"{team.team} {_reward(team)} valid {_valid(team)}" for team in report.teams]
        cells += [f"kept {_kept(report)}", f"{tokens_per_second(self._window):,.0f} tokens/s", f"ETA {self.eta()}"]
        return "  ".join(cells) + "".join(f"  ALARM {alarm}" for alarm in report.alarms)

    def eta(self) -> str:
        """Time that is left at the pace so far.

        >>> Progress(total=3, quiet=True).eta()
        '?'
        """
        if not self._window:
            return "?"
        done = self._window[-1].tick - self.start
        seconds = (self._clock() - self._began) / max(done, 1) * max(self.total - self._window[-1].tick, 0)
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"

    def _table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        teams = list(dict.fromkeys(team.team for report in self._window for team in report.teams))
        caption = f"{tokens_per_second(self._window):,.0f} tokens/s, {self.eta()} left"
        caption += "".join(f"\n[bold red]ALARM[/] {escape(alarm)}" for alarm in self._alarms)
        table = Table(caption=caption, caption_justify="left", pad_edge=False)
        table.add_column(f"tick of {self.total}", justify="right")
        for team in teams:
            table.add_column(escape(team), justify="right")
            table.add_column("valid", justify="right", style="dim")
        for heading in ("kept", "tokens/s"):
            table.add_column(heading, justify="right")
        for report in self._window:
            own = {team.team: team for team in report.teams}
            cells = [cell for team in teams for cell in _cells(own.get(team))]
            table.add_row(str(report.tick), *cells, _kept(report), f"{tokens_per_second([report]):,.0f}")
        return table


def _cells(team: TeamReport | None) -> tuple[str, str]:
    return (_reward(team), _valid(team)) if team is not None else ("-", "-")


def _reward(team: TeamReport) -> str:
    return "-" if team.reward_mean is None else f"{team.reward_mean:+.3f}"


def _valid(team: TeamReport) -> str:
    return f"{team.valid_replies / team.replies:.0%}" if team.replies else "-"


def _kept(report: TickReport) -> str:
    """Share of the eligible tokens that the learner graded."""
    eligible = sum(step.eligible_tokens for step in report.steps)
    return f"{sum(step.graded_tokens for step in report.steps) / eligible:.1%}" if eligible else "-"
