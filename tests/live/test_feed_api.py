"""The feed loop against a real Feed API: what it trained is what it marks, also when the API was away meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from sparring.config import from_settings
from sparring.config_live import FeedConfig
from sparring.intake.feed import FeedClient, FeedError
from sparring.loops.feed import train_feed


def waiting(url: str) -> list[str]:
    page = httpx.get(f"{url}/api/crl/trajectories", params={"limit": 200}).json()
    return sorted(row["trajectoryId"] for row in page["trajectories"])


@pytest.fixture
def api(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A gateway that shows six trajectories by the Feed API."""
    _, url = start("intake", str(tmp_path / "theirs.sqlite"))
    monkeypatch.chdir(tmp_path)
    call = {"systemPrompt": "s", "userPrompt": "u", "response": "r", "purpose": "action"}
    rows = [
        {"trajectoryId": f"t{n}", "agentId": "a", "totalReward": n / 6, "steps": [{"llmCalls": [call], "done": True}]}
        for n in range(6)
    ]
    assert httpx.post(f"{url}/api/crl/trajectories", json={"trajectories": rows}).status_code == 200
    return str(url)


def config(url: str, batches: int) -> FeedConfig:
    return from_settings(FeedConfig, {
        "source": url, "model": "tiny", "least": 2, "most": 2, "batches": batches, "publish": False, "run": "pulled",
        "gate": {"mode": "off"}, "checkpoint": {"every": 2}, "poll_seconds": 0.1, "threads": 1, "quiet": True,
    })  # fmt: skip


def test_all_batches_of_a_checkpoint_are_marked(api: str) -> None:
    assert len(waiting(api)) == 6
    report = train_feed(config(api, 3))
    assert report.trajectories == report.retokenised == 6 and report.unreadable == 0
    assert waiting(api) == []


def test_what_the_api_did_not_hear_it_hears_later(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:

        def away(*_: Any) -> None:
            raise FeedError("POST mark-trained: away")

        patched.setattr(FeedClient, "mark", away)
        train_feed(config(api, 2))
    assert len(waiting(api)) == 6  # trained, but the API was away
    report = train_feed(config(api, 3), resume=Path("runs/pulled"))
    assert report.trajectories == 6 and waiting(api) == []
