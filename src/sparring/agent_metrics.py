"""What a run of small policies shows: a flat row an iteration for machines, a table of its policies for people."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.types import IterationReport, Spread, UpdateReport

COLUMNS = (
    ("LossPi", "policy_loss"), ("DeltaLossPi", "policy_loss_change"), ("LossV", "value_loss"),
    ("DeltaLossV", "value_loss_change"), ("KL", "kl"), ("Entropy", "entropy"), ("ClipFrac", "clip_fraction"),
    ("StopIter", "passes"),
)  # fmt: skip
"""Heading, and field of ``UpdateReport``."""


def iteration_row(report: IterationReport) -> dict[str, float | str | list[str] | None]:
    """One iteration as flat figures; a policy's own carry its name after a slash, and are left out where it has none.

    ``tick`` is the iteration: what a resume cuts the file back to.
    """
    row: dict[str, float | str | list[str] | None] = {
        "tick": report.iteration,
        "env_steps": report.env_steps,
        "dropped": report.dropped,
        "collect_seconds": report.collect_seconds,
        "seconds": report.seconds,
    }
    for name, spreads in (("return", report.returns), ("length", report.lengths)):
        for policy, spread in spreads.items():
            row[f"{name}_mean/{policy}"] = spread.mean
            row[f"{name}_least/{policy}"] = spread.least
            row[f"{name}_greatest/{policy}"] = spread.greatest
            row["episodes/" + policy] = spread.count
    row |= {f"return_recent/{policy}": value for policy, value in report.recent.items()}
    for update in report.updates:
        for field in UpdateReport.__slots__:
            value = getattr(update, field)
            if field == "version":
                value = value.step
            if field not in ("policy", "seconds"):
                row[f"{field}/{update.policy}"] = float(value) if isinstance(value, bool) else value
    return row


def table(report: IterationReport) -> str:
    """One line a policy: EpRet and EpLen (mean, least, greatest), losses and their change over the passes, divergence,
    entropy, clipped share, passes."""
    updates = {update.policy: update for update in report.updates}
    names = sorted({*updates, *report.returns})
    rows = [["policy", "EpRet", "EpLen", *(heading for heading, _ in COLUMNS)]]
    for name in names:
        update = updates.get(name)
        cells = [name, _spread(report.returns, name), _spread(report.lengths, name)]
        cells += ["-" if update is None else f"{getattr(update, field):.4g}" for _, field in COLUMNS]
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)


def _spread(spreads: Mapping[str, Spread], name: str) -> str:
    if name not in spreads:
        return "-"
    spread = spreads[name]
    return f"{spread.mean:.1f} ({spread.least:.1f}..{spread.greatest:.1f})"
