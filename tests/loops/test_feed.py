"""Learning from what comes in: each trajectory once, whatever is killed; what is worse is not published."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from loop_toys import assert_same_run
from sparring.checkpoints import latest, read_checkpoint, verify_checkpoint
from sparring.config import from_settings
from sparring.config_live import FeedConfig
from sparring.errors import CheckpointError
from sparring.intake.feed import FeedClient, FeedError
from sparring.intake.trajectory_log import NewItem, Status, TrajectoryLog
from sparring.intake.wire import Call, LoggedTrajectory, Message, encode_body
from sparring.loops import feed
from sparring.loops.feed import train_feed
from sparring.publishing import Kind, current, history
from sparring.suite_results import SuiteFigure, SuiteResult

LOG = Path("log.sqlite")


def item(number: int, **more: Any) -> NewItem:
    rng = random.Random(number)
    reply = tuple(rng.randrange(320) for _ in range(4))
    call = Call(
        prompt_ids=tuple(rng.randrange(320) for _ in range(6)), reply_ids=reply, log_probs=(-1.0, -2.0, -0.5, -3.0),
        version=more.pop("version", "v1.0"), **more,
    )  # fmt: skip
    body = LoggedTrajectory(
        agent=f"a{number % 3}", team=("red", "blue")[number % 2], calls=(call,), reward=rng.random()
    )
    return NewItem(key=f"k{number}", producer="p", kind="turns", body=encode_body(body), scored=True)


def fill(count: int, *, first: int = 0) -> None:
    with TrajectoryLog(LOG) as log:
        log.append([item(number) for number in range(first, first + count)])


def small(model: str, **settings: Any) -> FeedConfig:
    base = FeedConfig(source=str(LOG), model=model, publish=False, quiet=True, threads=1, poll_seconds=0.05)
    usual = {"least": 4, "most": 4, "gate": {"mode": "off"}, "checkpoint": {"every": 2, "keep": 2}}
    return from_settings(FeedConfig, usual | settings, base)


def counts() -> dict[str, int]:
    with TrajectoryLog(LOG) as log:
        return log.counts()


def weights(run: str) -> dict[str, torch.Tensor]:
    newest = latest(Path("runs") / run / "checkpoints")
    assert newest is not None
    return dict(read_checkpoint(newest).tensors["policy-shared.safetensors"])


def test_all_that_came_is_trained_once_and_resume_is_the_same_run(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(24)
    report = train_feed(small(model, run="whole", batches=6))
    assert (report.batches, report.trajectories, report.calls, report.step) == (6, 24, 24, 6) and not report.stopped
    assert counts()["trained"] == 24
    LOG.unlink()
    fill(24)
    with monkeypatch.context() as patched:  # killed between the rename and the acknowledgement of the second checkpoint
        acknowledge = TrajectoryLog.acknowledge

        def killed(self: TrajectoryLog, lease: Any, through: int) -> None:
            if through >= 4:
                raise KeyboardInterrupt
            acknowledge(self, lease, through)

        patched.setattr(TrajectoryLog, "acknowledge", killed)
        with pytest.raises(KeyboardInterrupt):
            train_feed(small(model, run="parts", batches=6))
    assert counts()["batched"] == 8
    parts = train_feed(small(model, run="parts", batches=6), resume=Path("runs/parts"))
    assert parts.trajectories == 24 and counts()["trained"] == 24
    assert_same_run(Path("runs/whole"), Path("runs/parts"))


def test_what_cannot_be_trained_is_counted(model: str) -> None:
    with TrajectoryLog(LOG) as log:
        long = LoggedTrajectory(
            agent="a", calls=(Call(prompt_ids=(1,) * 5000, reply_ids=(2,), log_probs=(-1.0,)),), reward=1.0
        )
        text = LoggedTrajectory(agent="a", reward=1.0, calls=(Call(messages=(Message("user", "hi"),), reply="yes"),))
        other = LoggedTrajectory(
            agent="a", calls=(Call(prompt_ids=(9999,), reply_ids=(2,), log_probs=(-1.0,)),), reward=1.0
        )
        rows = [("long", long), ("text", text), ("other", other)]
        log.append([
            item(0), item(1, version="v1.999"), item(2, purpose="reasoning"), item(3, temperature=0.0),
            *[NewItem(key=k, producer="p", kind="turns", body=encode_body(t), scored=True) for k, t in rows],
        ])  # fmt: skip
    report = train_feed(small(model, run="odd", batches=1, least=1, most=9, loss={"max_version_lag": 50}))
    assert report.trajectories == 6 and report.calls == 2 and report.retokenised == 1 and report.stale == 1
    assert report.left_out == {
        "another purpose": 1, "greedy: nothing was sampled": 1, "ids of another model": 1, "longer than the context": 1,
    }  # fmt: skip
    with TrajectoryLog(LOG) as log:
        found = log.find("k1")
        assert found is not None and found[1] is Status.STALE and "999 steps old" in str(found[2])


def test_a_log_that_is_not_the_runs_is_refused(model: str) -> None:
    fill(8)
    train_feed(small(model, run="first", batches=2))
    LOG.unlink()
    fill(8)
    with pytest.raises(Exception, match="another log"):
        train_feed(small(model, run="first", batches=3), resume=Path("runs/first"))
    config = small(model, run="first", loss={"kl_coefficient": 0.1}, gate={"mode": "off", "unit": "reply"})
    with pytest.raises(CheckpointError, match=r"loss\.kl_coefficient"):
        train_feed(config, resume=Path("runs/first"))


class Judge:
    """In place of the market's panel: all weights do alike but those that are measured third, which do nothing right."""

    panel = "judge"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls = 0

    def measure(self, policy: Any, checkpoint: Path) -> SuiteResult:
        self.calls += 1
        keys = tuple(f"probe-{number}" for number in range(40))
        figure = SuiteFigure(measures=((float(self.calls != 3),) * 40,), higher_is_better=True, unit="share")
        _, manifest = verify_checkpoint(checkpoint)
        return SuiteResult(checkpoint=manifest, panel=self.panel, keys=keys, figures={"right": figure}, seconds=0.0)


def test_each_checkpoint_is_judged_once_and_the_worse_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "QuickSuite", Judge)
    fill(24)
    report = train_feed(small(model, run="live", batches=6, publish=True))
    assert (report.published, report.refused, report.serves) == (3, 1, "v1.6")
    lines = [(line.kind, line.version) for line in history(Path("runs/live"))]
    assert [version for kind, version in lines if kind is Kind.PUBLISHED] == ["v1.0", "v1.2", "v1.6"]
    assert (Kind.REFUSED, "v1.4") in lines
    kept = sorted(path.name for path in Path("runs/live/checkpoints").iterdir())
    assert kept == ["step-000000", "step-000002", "step-000004", "step-000006"]  # two newest, and what a rollback takes
    again = train_feed(small(model, run="live", batches=6, publish=True), resume=Path("runs/live"))
    assert again.published == 3  # nothing new to judge


def test_a_kill_between_rename_and_publication_is_healed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "QuickSuite", Judge)
    fill(8)
    with monkeypatch.context() as patched:
        judged = feed.judged

        def killed(run: Path, policy: Any, suite: Any, checkpoint: Path) -> Any:
            if policy.version.step == 2:
                raise KeyboardInterrupt
            return judged(run, policy, suite, checkpoint)

        patched.setattr(feed, "judged", killed)
        with pytest.raises(KeyboardInterrupt):
            train_feed(small(model, run="live", batches=2, publish=True))
    now = current(Path("runs/live"))
    assert now is not None and now.version == "v1.0"
    train_feed(small(model, run="live", batches=2, publish=True), resume=Path("runs/live"))
    now = current(Path("runs/live"))
    assert now is not None and now.version == "v1.2"


def test_sigkill_at_any_moment_trains_everything_once(model: str) -> None:
    """A real process, killed again and again; then the weights of a run that was never killed."""
    fill(32)
    train_feed(small(model, run="whole", batches=8))
    expected = weights("whole")
    LOG.unlink()
    fill(32)
    toml = Path("feed.toml")
    from sparring.config import to_toml

    toml.write_text(to_toml(small(model, run="killed", batches=8)))
    rng, kills = random.Random(3), 0
    for attempt in range(12):
        resume = ["--resume", "killed"] if Path("runs/killed/config.toml").exists() else ["--config", str(toml)]
        command = [sys.executable, "-m", "sparring", "train", "feed", *resume]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        seen = len(list(Path("runs/killed/checkpoints").glob("step-*"))) if Path("runs/killed").exists() else 0
        while process.poll() is None and time.monotonic() < deadline:
            now = (
                len(list(Path("runs/killed/checkpoints").glob("*"))) if Path("runs/killed/checkpoints").exists() else 0
            )
            if attempt < 3 and now > seen:
                time.sleep(rng.random() * 0.2)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        if process.wait() == 0:
            break
    assert kills >= 2 and counts()["trained"] == 32
    found = weights("killed")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_feed_api_is_pulled_page_by_page_and_told_what_was_trained(tmp_path: Path) -> None:
    rows = [
        {"trajectoryId": f"t{n}", "agentId": "a", "totalReward": 1.0, "steps": [
            {"llmCalls": [{"systemPrompt": "s", "userPrompt": "u", "response": "r"}]}
        ]} for n in range(5)
    ]  # fmt: skip
    marked: list[str] = []
    failures = iter([True, False, False, True] + [False] * 50)

    def api(request: httpx.Request) -> httpx.Response:
        if next(failures):
            return httpx.Response(503)
        assert request.headers["authorization"] == "Bearer t"
        if request.url.path.endswith("identity-map"):
            return httpx.Response(200, json={"identityMap": {"a": {"team": "red"}}, "counts": {}})
        if request.method == "POST":
            marked.extend(msgspec.json.decode(request.content)["trajectoryIds"])
            return httpx.Response(200, json={"success": True})
        start = int(request.url.params.get("cursor", "0"))
        page = rows[start : start + 2]
        if start == 4:
            page = [*page, {"agentId": 5}]
        return httpx.Response(200, json={"trajectories": page, "cursor": str(start + 2), "hasMore": start + 2 < 5})

    client = FeedClient("http://feed", token="t", transport=httpx.MockTransport(api))
    with TrajectoryLog(tmp_path / "log.sqlite") as log:
        first, second = client.pull(log), client.pull(log)
        assert (first.new, first.unreadable, second.new, second.unreadable) == (5, 1, 0, 1)
        assert "agentId" in first.reason or "trajectory" in first.reason
        assert log.counts()["ready"] == 5
        client.mark(["feed/t0", "feed/t1"], "run/1")
    assert marked == ["t0", "t1"]
    odd = FeedClient("http://feed", transport=httpx.MockTransport(lambda _: httpx.Response(200, text="<html>")))
    with TrajectoryLog(tmp_path / "log.sqlite") as log, pytest.raises(FeedError, match="no identity map"):
        odd.pull(log)
    broken = FeedClient("http://feed", transport=httpx.MockTransport(lambda _: httpx.Response(401, text="no")))
    with TrajectoryLog(tmp_path / "log.sqlite") as log, pytest.raises(FeedError, match="401"):
        broken.pull(log)
