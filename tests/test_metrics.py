"""Figures by hand, alarms of collapse, transcripts that survive a kill, progress, and the run's directory."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sparring.config import SharedConfig, load_config, to_toml
from sparring.errors import ConfigError
from sparring.files import FileError, read_jsonl, truncate_jsonl
from sparring.metrics import (
    AlarmSettings,
    MetricsWriter,
    Progress,
    Transcript,
    collapse_alarms,
    entropy,
    metrics_row,
    read_metrics,
    tokens_per_second,
)
from sparring.rundir import RunDirectory, Session, find_run, read_run_manifest
from sparring.types import (
    EpisodeReport,
    Outcome,
    ParseFailure,
    ParseFailureKind,
    PolicyVersion,
    Reward,
    SamplingSettings,
    Settlement,
    SkipReason,
    StepReport,
    TeamReport,
    TickReport,
    Turn,
    TurnId,
)

VERSION = PolicyVersion(incarnation=1, step=4)


def team(
    name: str = "blue",
    *,
    actions: Mapping[str, int] | None = None,
    replies: int = 10,
    valid: int = 9,
    tokens: int = 200,
) -> TeamReport:
    return TeamReport(
        team=name,
        replies=replies,
        valid_replies=valid,
        settled=4,
        reward_mean=0.5,
        reward_parts={"trade": 0.2, "secrets": 0.3},
        kept_replies=2,
        action_counts={"wait": 3, "buy": 6} if actions is None else actions,
        reply_tokens=tokens,
    )


def step(policy: str = "shared", **changes: object) -> StepReport:
    report = StepReport(
        policy=policy,
        version=VERSION,
        skipped=None,
        loss=0.25,
        grad_norm=2.0,
        eligible_replies=8,
        kept_replies=2,
        eligible_tokens=100,
        graded_tokens=3,
        forwarded_tokens=400,
        mean_ratio=1.0,
        max_ratio=1.5,
        mean_version_lag=0.0,
        entropy=0.75,
        kl_to_reference=None,
        seconds=0.5,
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def tick(number: int = 1, *, teams: tuple[TeamReport, ...] | None = None, **changes: object) -> TickReport:
    report = TickReport(
        tick=number,
        teams=(team("blue"), team("red")) if teams is None else teams,
        steps=(step(),),
        sampled_tokens=400,
        prompt_tokens=1000,
        sampling_seconds=1.0,
        seconds=2.0,
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def test_a_row_by_hand() -> None:
    red = replace(team("red"), reward_mean=-1.0, settled=12, reply_tokens=100, valid_replies=5)
    ended = [
        EpisodeReport(episode=0, ticks=16, figures={"deals": 2.0}),
        EpisodeReport(episode=1, ticks=16, figures={"deals": 4.0}),
    ]
    row = metrics_row(tick(7, teams=(team("blue"), red), alarms=("red: x",)), ended)
    expected = {
        "tick": 7,
        "tokens_per_second": 200.0,
        "reward_mean": (0.5 * 4 - 1.0 * 12) / 16,
        "completion_length": 15.0,
        "valid_share": 0.7,
        "reward_mean/blue": 0.5,
        "reward_mean/red": -1.0,
        "reward_part/trade/blue": 0.2,
        "valid_share/blue": 0.9,
        "completion_length/red": 10.0,
        "actions/buy/blue": 6,
        "kept_replies/blue": 2,
        "loss": 0.25,
        "loss/shared": 0.25,
        "grad_norm": 2.0,
        "entropy": 0.75,
        "graded_share/shared": 0.03,
        "step/shared": 4,
        "episodes_ended": 2,
        "episode/deals": 3.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["alarms"] == ["red: x"]
    assert row["action_entropy/blue"] == pytest.approx(-(1 / 3) * math.log(1 / 3) - (2 / 3) * math.log(2 / 3))
    assert "kl" not in row and "kl/shared" not in row


def test_several_policies_are_weighted_and_a_skipped_step_says_why() -> None:
    steps = (
        step("blue", loss=1.0, kl_to_reference=0.1),
        step("red", loss=4.0, eligible_tokens=300),
        step("gray", skipped=SkipReason.EQUAL_REWARDS),
    )
    row = metrics_row(tick(steps=steps))
    assert row["loss"] == pytest.approx((1.0 * 100 + 4.0 * 300) / 400)
    assert (row["kl"], row["kl/blue"]) == (pytest.approx(0.1), 0.1)
    assert row["skipped/gray"] == "equal_rewards" and "loss/gray" not in row


def test_nothing_behind_a_figure_leaves_it_out() -> None:
    nothing = TeamReport(
        team="blue",
        replies=0,
        valid_replies=0,
        settled=0,
        reward_mean=None,
        reward_parts={},
        kept_replies=0,
        action_counts={},
        reply_tokens=0,
    )
    row = metrics_row(tick(teams=(nothing,), steps=(), seconds=0.0))
    assert not {
        "reward_mean",
        "reward_mean/blue",
        "valid_share",
        "valid_share/blue",
        "loss",
        "action_entropy/blue",
    } & set(row)
    assert row["tokens_per_second"] == 0.0


def test_lines_are_flushed_read_back_and_cut_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        for number in (1, 2, 3):
            writer.write(tick(number, steps=(step(loss=math.nan),)))
            assert [row["tick"] for row in read_metrics(file)] == list(range(1, number + 1))
        writer.sync()
    assert read_metrics(tmp_path)[0]["loss/shared"] is None, "JSON has no NaN"
    with file.open("ab") as torn:
        torn.write(b'{"tick": 4, "los')
    assert truncate_jsonl(file, 2) == 2
    with MetricsWriter(file) as writer:
        writer.write(tick(3))
    assert [row["tick"] for row in read_metrics(file)] == [1, 2, 3]
    with pytest.raises(FileError, match="cannot write"):
        MetricsWriter(tmp_path / "none" / "metrics.jsonl")


# Transcripts


def settlement(episode: int = 0, env_tick: int = 0, *, action: object = None) -> Settlement:
    turn = Turn(
        id=TurnId(episode=episode, agent="a00", tick=env_tick),
        team="blue",
        policy="shared",
        version=VERSION,
        sampling=SamplingSettings(),
        prompt_ids=(1, 2),
        reply_ids=(3, 4),
        log_probs=(-0.5, -0.25),
        action=action or ParseFailure(kind=ParseFailureKind.NO_JSON, detail="no '{'"),
    )
    outcome = Outcome(turn=turn.id, facts={"taken": 3}, settled_at=env_tick + 2)
    return Settlement(turn=turn, outcome=outcome, reward=Reward(total=0.5, parts={"trade": 0.5}))


def test_a_transcript_has_a_line_a_turn(tmp_path: Path) -> None:
    transcript = Transcript(tmp_path / "episodes")
    transcript.write(settlement(action={"action": "wait"}), tick=1, reply='{"action":"wait"}', prompt="Tick 1")
    transcript.write(settlement(episode=12), tick=1, reply="hm")
    transcript.flush()
    transcript.write(settlement(env_tick=1, action=object()), tick=2, reply="")
    transcript.flush()
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == ["000000.jsonl.zst", "000012.jsonl.zst"]
    first, second = read_jsonl(tmp_path / "episodes" / "000000.jsonl.zst")
    assert first["action"] == {"action": "wait"} and first["failure"] is None and first["prompt"] == "Tick 1"
    assert (first["tick"], first["env_tick"], first["settled_at"], first["surprisal"]) == (1, 0, 2, 0.75)
    assert (first["version"], first["reward"], first["facts"]) == ("v1.4", 0.5, {"taken": 3})
    assert "prompt" not in second and str(second["action"]).startswith("<object")
    (other,) = read_jsonl(tmp_path / "episodes" / "000012.jsonl.zst")
    assert other["failure"] == {"kind": "no_json", "detail": "no '{'"} and other["action"] is None


def test_a_transcript_goes_on_after_a_kill(tmp_path: Path) -> None:
    def play(ticks: range) -> None:
        transcript = Transcript(tmp_path)
        for number in ticks:
            transcript.write(settlement(env_tick=number), tick=number, reply="x" * 50)
            transcript.flush()

    file = tmp_path / "000000.jsonl.zst"
    play(range(1, 4))
    os.truncate(file, file.stat().st_size - 7)
    assert [row["tick"] for row in read_jsonl(file)] == [1, 2]
    play(range(3, 6))
    assert [row["tick"] for row in read_jsonl(file)] == [1, 2, 3, 4, 5]
    assert truncate_jsonl(file, 4) == 4
    play(range(5, 7))
    assert [row["tick"] for row in read_jsonl(file)] == [1, 2, 3, 4, 5, 6]


# Alarms


def window(*teams: TeamReport, ticks: int = 20) -> list[TickReport]:
    return [tick(number, teams=teams) for number in range(1, ticks + 1)]


HEALTHY = {"send_message": 3, "comment": 2, "buy": 3, "wait": 2}


def test_a_healthy_window_is_silent() -> None:
    assert collapse_alarms(window(team("red", actions=HEALTHY), team("blue", actions=HEALTHY))) == ()
    assert collapse_alarms([]) == ()


@pytest.mark.parametrize(
    ("report", "alarm"),
    [
        (team("blue", actions={"wait": 99, "buy": 1}), "blue: action entropy is 0.06 nats, 99% of actions are wait"),
        (team("blue", actions={"refuse": 5, "block": 4, "wait": 1}), "blue: 90% of actions are refusals"),
        (team("blue", actions=HEALTHY, valid=4), "blue: only 40% of replies are valid actions"),
        (team("red", actions={"buy": 5, "sell": 4, "wait": 1}), "red: attack rate is 0.0%: it has all but given up"),
        (
            team("red", actions={"send_message": 6, "wait": 4}),
            "red: 100% of attacks are send_message: they are all alike",
        ),
    ],
)
def test_each_alarm(report: TeamReport, alarm: str) -> None:
    assert collapse_alarms(window(report)) == (alarm,)


def test_length_is_watched_in_both_directions() -> None:
    def alarm(before: int, after: int) -> tuple[str, ...]:
        reports = [tick(n, teams=(team(actions=HEALTHY, tokens=before if n <= 10 else after),)) for n in range(1, 21)]
        return collapse_alarms(reports)

    assert alarm(200, 400) == ("blue: mean reply went from 20 to 40 tokens",)
    assert alarm(400, 200) == ("blue: mean reply went from 40 to 20 tokens",)
    assert alarm(200, 290) == ()


def test_few_replies_prove_nothing() -> None:
    report = team("blue", actions={"wait": 10}, valid=1)
    assert collapse_alarms(window(report, ticks=9)) == ()
    assert len(collapse_alarms(window(report, ticks=9), AlarmSettings(min_replies=50))) == 2


def test_entropy_and_pace() -> None:
    assert entropy({"a": 4}) == 0.0
    assert entropy({"a": 1, "b": 1, "c": 1, "d": 1, "e": 0}) == pytest.approx(math.log(4))
    assert tokens_per_second([tick(), tick(seconds=6.0)]) == pytest.approx(100.0)


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_are_few_and_alarms_are_told_once() -> None:
    out = io.StringIO()
    clock = iter([0.0, *(float(number) for number in range(1000))])
    with Progress(total=25, every=10, stream=out, clock=lambda: next(clock)) as progress:
        for number in range(1, 26):
            progress.update(tick(number, alarms=("red: x",) if number >= 13 else ()))
        progress.note("checkpoint step-000025")
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["tick 10/25", "tick 13/25", "tick 20/25", "tick 25/25"]
    assert lines[0].startswith("tick 10/25  blue +0.500 valid 90%  red +0.500 valid 90%  kept 3.0%  200 tokens/s  ETA")
    assert "ALARM red: x" in lines[1] and lines[-1] == "checkpoint step-000025"


def test_time_left() -> None:
    now = [0.0]
    progress = Progress(total=110, start=10, quiet=True, clock=lambda: now[0])
    with progress:
        now[0] = 100.0
        progress.update(tick(20))
        assert progress.eta() == "15:00"
        now[0] = 1000.0
        assert progress.eta() == "2:30:00"


def test_quiet_shows_warnings_only() -> None:
    out = io.StringIO()
    with Progress(total=2, quiet=True, stream=out) as progress:
        progress.update(tick(1))
        progress.note("saved")
        progress.note("warning: a fallback was used")
    assert out.getvalue() == "warning: a fallback was used\n"


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with Progress(total=3, stream=out, rows=2) as progress:
        for number in (1, 2, 3):
            progress.update(tick(number, alarms=("red: [x]",)))
        progress.note("saved [a]")
    text = out.getvalue()
    for expected in ("tick of 3", "blue", "+0.500", "90%", "3.0%", "tokens/s", "ALARM", "red: [x]", "saved [a]"):
        assert expected in text


# The run's directory


def session(**changes: object) -> Session:
    now = Session.now(device="cpu", threads=2)
    return replace(now, **changes)  # type: ignore[arg-type]


def made(root: Path, name: str | None = "a") -> RunDirectory:
    return RunDirectory.create(name, config_toml=to_toml(SharedConfig()), seed=3, session=session(), root=root)


def test_a_run_is_made_once_and_says_how_to_repeat_it(tmp_path: Path) -> None:
    with made(tmp_path) as run:
        assert load_config(SharedConfig, toml=run.path / "config.toml") == SharedConfig()
        manifest = read_run_manifest(run.path)
        assert (manifest.name, manifest.seed, len(manifest.sessions)) == ("a", 3, 1)
        (first,) = manifest.sessions
        assert first.argv == tuple(sys.argv) and first.threads == 2 and first.dtype == "float32"
        assert {"python", "sparring", "torch", "numpy"} <= set(first.versions) and first.machine
        assert run.write_report({"ticks": 3, "loss": math.nan}).read_bytes() == b'{\n "ticks": 3,\n "loss": null\n}\n'
    with pytest.raises(ConfigError, match=r"run 'a' exists in .*--resume a"):
        made(tmp_path)
    names = set()
    for _ in range(3):
        with made(tmp_path, None) as run:
            names.add(run.path.name)
    assert len(names) == 3 and all(name.startswith("run-") for name in names)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run's directory"):
        made(tmp_path / "file")


def test_one_process_writes_a_run_and_a_kill_lets_go(tmp_path: Path) -> None:
    made(tmp_path).close()
    code = (
        "import sys, time; from pathlib import Path; from sparring.rundir import RunDirectory, Session\n"
        "s = Session.now(device='cpu', threads=1)\n"
        "run = RunDirectory.open(Path(sys.argv[1]), session=s); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"is being written by process {holder.pid} on"):
            RunDirectory.open(tmp_path / "a", session=session())
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with RunDirectory.open(tmp_path / "a", session=session(threads=7)) as run:
        assert "threads was 1, is 7" in run.notices
        assert len(read_run_manifest(run.path).sessions) == 3


def test_a_resume_cuts_everything_back(tmp_path: Path) -> None:
    with made(tmp_path) as run:
        with MetricsWriter(run.metrics) as writer:
            transcript = Transcript(run.episodes)
            for number in range(1, 7):
                writer.write(tick(number))
                transcript.write(settlement(episode=number // 4, env_tick=number), tick=number, reply="")
                transcript.flush()
        run.write_report({})
        run.cut_back(3)
        assert [row["tick"] for row in read_metrics(run.path)] == [1, 2, 3]
        assert [path.name for path in run.episodes.iterdir()] == ["000000.jsonl.zst"]
        assert not (run.path / "report.json").exists()


def test_runs_are_found_by_path_or_name(tmp_path: Path) -> None:
    made(tmp_path).close()
    assert find_run("a", root=tmp_path) == find_run(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(ConfigError, match=r"no run 'b' \(no config.toml\); in .* there are: a"):
        find_run("b", root=tmp_path)
    (tmp_path / "a" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"manifest.json is damaged"):
        read_run_manifest(tmp_path / "a")


def test_metrics_load_without_torch() -> None:
    code = "import sys, sparring.metrics; assert not {'torch', 'rich', 'zstandard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
