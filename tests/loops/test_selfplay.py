"""The self-play loop: a dry run through the real parser, validator and rewards; real steps; resume to the bit in mid-phase."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from loop_toys import assert_same_run, random_model
from sparring.config import EvalConfig, SelfplayConfig
from sparring.envs.graph.records import Query
from sparring.errors import CheckpointError, ConfigError
from sparring.evaluation import graph_panel
from sparring.evaluation.evaluate import evaluate_run
from sparring.league import graph_match
from sparring.league.graph_match import PoolTask
from sparring.loops import selfplay
from sparring.loops.selfplay import plan, train_selfplay
from sparring.rewards.graph_classic import answerer_reward as classic_reward
from sparring.runs import build_selfplay_policies, load_policy
from sparring.settings_io import from_settings

SEEN: list[dict[str, Any]] = []
SMALL: dict[str, Any] = {
    "rounds": 2,
    "worlds": 2,
    "generator_steps": 2,
    "generator_prompts": 2,
    "generator_samples": 2,
    "answerer_steps": 2,
    "answerer_tasks": 3,
    "answerer_samples": 3,
    "generator_sampling": {"max_new_tokens": 5},
    "answerer_sampling": {"max_new_tokens": 5},
    "optimizer": {"learning_rate": 1e-2},
    "checkpoint": {"every": 100},
    "eval_tasks": 0,
    "quiet": True,
}


def even_tokens(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float | None]:
    """With the signature of a TRL reward: it differs from reply to reply, whatever the reply says."""
    SEEN.append({"prompts": prompts, "completions": completions, **columns})
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def small(**settings: Any) -> SelfplayConfig:
    return from_settings(SelfplayConfig, {**SMALL, **settings})


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return random_model(tmp_path / "model")


def stop_after(steps: int) -> Callable[[], Any]:
    @contextmanager
    def stopping() -> Iterator[Callable[[], bool]]:
        left = steps

        def stop() -> bool:
            nonlocal left
            left -= 1
            return left == 0

        yield stop

    return stopping


def test_the_plan() -> None:
    phases = [(at.round, at.phase, at.last) for at in plan(small(schedule="answerer_generator_answerer", rounds=1))]
    assert phases == [
        (0, "answerer_pre", False), (0, "answerer_pre", True), (0, "generator", False), (0, "generator", True),
        (0, "answerer", False), (0, "answerer", True),
    ]  # fmt: skip


def test_a_dry_run_writes_every_file_of_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = train_selfplay(
        small(dry_run=True, run="dry", schedule="answerer_generator_answerer", generator_prompts=6, generator_samples=4)
    )
    folder = tmp_path / "runs" / "dry"
    names = {
        "generator_dataset", "answerer_dataset", "answerer_pre_dataset", "generated_tasks", "canonical_graph_candidates",
        "replay_traces", "validation_reports",
    }  # fmt: skip
    for number in ("round_001", "round_002"):
        files = {file.stem: json.loads(file.read_text()) for file in (folder / number).iterdir()}
        assert set(files) == names
        reports = files["validation_reports"]
        assert len(reports) == 2 * 6 * 4
        valid = [row for row in reports if row["validation"]["is_valid"]]
        assert 0.4 < len(valid) / len(reports) < 1.0
        assert all(row["validation"]["reasons"] for row in reports if row not in valid)
        assert {row["question"] for row in files["generated_tasks"]} <= {row["question"] for row in valid}
        assert len(files["answerer_dataset"]) == 2 * 3
        assert set(files["answerer_dataset"][0]) == {
            "prompt", "question", "answer", "supporting_edges_json", "difficulty", "task_type", "task_id",
        }  # fmt: skip
    summary = json.loads((folder / "self_play_summary.json").read_text())
    assert [row["round"] for row in summary["rounds"]] == [1, 2] and summary["dry_run"]
    assert not any(row["fallback_used"] for row in summary["rounds"])
    assert set(summary) == {
        "dry_run", "model_topology", "phase_schedule", "tuning_mode", "canonical_graph_mode", "initial_models",
        "final_models", "post_training_evaluation", "rounds",
    }  # fmt: skip
    for phase in ("generator", "answerer_pre", "answerer"):
        assert [row[phase]["skipped"] for row in summary["rounds"]] == [True, True]
    assert summary["rounds"][0]["generator"]["train_rows"] == 2 * 6 * 4
    assert report.fallbacks == 0 and report.steps == {} and report.tasks > 10
    assert sum(report.solve_rates.values()) == report.tasks
    assert report.task_budget[1] > 50
    text = (folder / "round_001" / "validation_reports.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def test_completions_that_draw_a_graph_are_shown_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_selfplay(small(
        dry_run=True, run="drawn", canonical_graph="generate", generator_prompts=6, generator_samples=4, rounds=1,
        anchor_share=0.0,
    ))  # fmt: skip
    folder = tmp_path / "runs" / "drawn" / "round_001"
    asked = json.loads((folder / "generator_dataset.json").read_text())
    assert all(row["prompt"].startswith("Ask and draw.") for row in asked)
    drawn = {
        row["question"]: row["canonical_graph"]["edges"]
        for row in json.loads((folder / "canonical_graph_candidates.json").read_text())
    }
    assert all(len(edges) >= 4 for edges in drawn.values())
    posed = [row for row in json.loads((folder / "answerer_dataset.json").read_text()) if row["question"] in drawn]
    assert posed
    for row in posed:
        for edge in drawn[row["question"]]:
            assert f"{edge['src']} {edge['rel']} {edge['dst']}" in row["prompt"]


def test_a_generator_without_a_valid_task_is_not_covered_up(model: str) -> None:
    report = train_selfplay(small(model=model, run="poor"))
    assert report.valid_completions == 0 and report.tasks == 0
    assert report.fallbacks == 2 * 2 * 2  # every task that was not an anchor, in every answerer step
    summary = json.loads(Path("runs/poor/self_play_summary.json").read_text())
    assert all(row["fallback_used"] and row["valid_rate"] == 0.0 for row in summary["rounds"])


@pytest.mark.parametrize(
    "settings",
    [
        {"opponents": 1},
        {"topology": "dual", "adapters": "lora", "lora": {"rank": 2}, "opponents": 1},
        {"loss": {"kl_coefficient": 0.1}, "schedule": "answerer_generator_answerer", "rounds": 1},
        {"advantages": {"kind": "running"}, "gate": {"mode": "kondo", "rate": 0.5}},
    ],
)
def test_resume_in_mid_phase_is_the_same_run(
    model: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(model=model, answerer_reward="test_selfplay:even_tokens", run="whole", **settings)
    whole = train_selfplay(config)
    assert sum(whole.steps.values()) > 0
    first = from_settings(SelfplayConfig, {"run": "parts"}, config)
    with monkeypatch.context() as patched:
        patched.setattr(selfplay, "stop_on_signals", stop_after(3))
        assert train_selfplay(first).stopped
    parts = train_selfplay(first, resume=Path("runs/parts"))
    assert not parts.stopped and parts.steps == whole.steps
    assert_same_run(Path("runs/whole"), Path("runs/parts"))
    summaries = [json.loads(Path(f"runs/{name}/self_play_summary.json").read_text()) for name in ("whole", "parts")]
    drop_paths = [{**row, "rounds": [{**r, "artifacts": None} for r in row["rounds"]]} for row in summaries]
    assert drop_paths[0] == drop_paths[1] and len(summaries[0]["rounds"]) == config.rounds
    assert summaries[0]["rounds"][0]["answerer"]["global_step"] > 0
    for file in sorted(Path("runs/whole").glob("round_*/*.json")):
        assert file.read_bytes() == (Path("runs/parts") / file.relative_to("runs/whole")).read_bytes()


def test_a_resume_that_does_not_fit_says_what_cannot_change(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(model=model, answerer_reward="test_selfplay:even_tokens", run="parts")
    with monkeypatch.context() as patched:
        patched.setattr(selfplay, "stop_on_signals", stop_after(2))
        train_selfplay(config)
    changed = from_settings(SelfplayConfig, {"loss": {"kl_coefficient": 0.1}}, config)
    with pytest.raises(CheckpointError, match=r"step-000002.*no reference-shared.*loss.kl_coefficient"):
        train_selfplay(changed, resume=Path("runs/parts"))


def test_a_trl_reward_plugs_in(model: str) -> None:
    SEEN.clear()
    train_selfplay(small(model=model, answerer_reward="test_selfplay:even_tokens", run="trl", rounds=1))
    call = SEEN[0]
    assert call["prompts"][0][0]["role"] == "system" and call["completions"][0][0]["role"] == "assistant"
    assert {len(column) for column in call.values()} == {9}
    assert set(call) == {
        "prompts", "completions", "question", "answer", "supporting_edges_json", "difficulty", "task_type", "task_id",
    }  # fmt: skip
    policy = load_policy("trl")
    start = build_selfplay_policies(small(model=model))["shared"].state()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in policy.state().items())
    with pytest.raises(ConfigError, match="answerer_reward"):
        train_selfplay(small(model=model, answerer_reward="test_selfplay:nothing"))


@pytest.mark.parametrize("subagents", [0, 2])
def test_tools_over_several_turns(model: str, subagents: int) -> None:
    report = train_selfplay(small(
        model=model, access="tools", max_steps=2, answerer_reward="test_selfplay:even_tokens", run="tools", rounds=1,
        subagents=subagents,
    ))  # fmt: skip
    assert report.steps["shared"] > 0


def test_groups_and_teams_never_mix_roles_or_hops(model: str) -> None:
    train_selfplay(small(model=model, answerer_reward="test_selfplay:even_tokens", run="teams", rounds=1))
    from sparring.files import read_jsonl

    rows = [row for file in sorted(Path("runs/teams/episodes").iterdir()) for row in read_jsonl(file)]
    teams = {str(row["team"]) for row in rows}
    assert teams <= {f"{role}/{hops}" for role in ("generator", "answerer") for hops in (1, 2, 3)} and len(teams) > 2
    by_prompt: dict[Any, set[Any]] = {}
    for row in rows:
        by_prompt.setdefault((row["tick"], str(row["agent"])[:3]), set()).add(row["team"])
    assert all(len(found) == 1 for found in by_prompt.values())


def test_another_answerer_judges_and_leaves_no_trace(model: str) -> None:
    policy = build_selfplay_policies(small(model=model))["shared"]
    mine = policy.state()
    other = {name: tensor + 1.0 for name, tensor in mine.items()}
    with graph_match.weights_of(policy, other):
        assert all(torch.equal(tensor, other[name]) for name, tensor in policy.state().items())
    assert all(torch.equal(tensor, mine[name]) for name, tensor in policy.state().items())


def test_hard_and_easy_tasks_wait_behind_the_learnable() -> None:
    config = small(anchor_share=0.0, answerer_tasks=3)
    worlds = graph_match.worlds_of(config, 0)
    rng = Random(0)
    from sparring.envs.graph.solver import random_tasks

    tasks = random_tasks(worlds[0].graph, rng, 6, hops=(1,))
    pool = [
        PoolTask(task=task, world=0, solved=solved, attempts=8)
        for task, solved in zip(tasks, (0, 8, 4, 3, 5, 0), strict=True)
    ]
    chosen, missing = graph_match.choose(config, worlds, pool, plan(config)[2], 3)
    assert missing == 0 and {one.task.id for one in chosen} == {tasks[i].id for i in (2, 3, 4)}
    few, missing = graph_match.choose(config, worlds, pool[:1], plan(config)[2], 3)
    assert missing == 0 and len(few) == 3 and {one.task.id for one in few} == {tasks[0].id}
    none, missing = graph_match.choose(config, worlds, [], plan(config)[2], 3)
    assert missing == 3 and len(none) == 3
    assert len({one.task.query for one in none}) >= 1 and isinstance(none[0].task.query, Query)


def test_settings_that_contradict_each_other() -> None:
    for settings, said in (
        ({"max_hops": 7}, "max_hops"), ({"min_hops": 3, "max_hops": 2}, "max_hops"), ({"context_edges": 2}, "context_edges"),
        ({"judge_samples": 4}, "judge_samples"), ({"epochs": 2}, "clipped"), ({"anchor_share": 2.0}, "anchor_share"),
        ({"answerer_reward": "nice"}, "answerer_reward"), ({"subagents": 1}, "access"), ({"lora": {"rank": 4}}, "adapters"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            small(**settings)


def test_the_classic_reward_reads_whole_replies() -> None:
    from sparring.envs.graph.records import Triple

    gold = (Triple("user_1", "works_at", "org_2"),)
    ask = {"question": "where does user_1 work", "answer": "org_2", "evidence": gold}
    boast = '"orchestrator": {"spawn_count": 2, "finished_subtasks": 2, "critical_steps": 1, "breadth": 2, "depth": 1}'
    bare, wrong = classic_reward('{"answer": "org_2"}', **ask), classic_reward(f'{{"answer": "x", {boast}}}', **ask)
    assert bare == pytest.approx(0.6071, abs=5e-5) and wrong == pytest.approx(0.6705, abs=1e-4)
    for hostile in (
        "",
        "{",
        '{"answer": null}',
        '{"supporting_edges": 5, "answer": 7, "orchestrator": {"depth": "none"}}',
        "[1]",
    ):
        assert 0.0 <= classic_reward(hostile, **ask) <= 1.5


def test_the_run_ends_with_held_out_figures_and_eval_repeats_them(model: str) -> None:
    report = train_selfplay(
        small(model=model, answerer_reward="test_selfplay:even_tokens", run="figures", rounds=1, eval_tasks=30)
    )
    row = report.flat()
    for name in ("accuracy_base", "accuracy_cloned", "accuracy_trained", "accuracy_second_edge", "valid_rate_start"):
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert row["fallbacks"] == 4 and row["accuracy_solver"] == 1.0 and row["accuracy_second_edge"] < 0.5
    assert row["valid_rate_end"] == 0.0 and "gain_over_solver" not in row
    again = evaluate_run(EvalConfig(run="runs/figures", situations=30, quiet=True))
    assert again.flat() == {name: row[name] for name in again.flat()}
    one = EvalConfig(run="runs/figures", situations=30, quiet=True)
    each, pool = graph_panel.evaluate_seeds([one, one])
    pooled = pool.flat()
    assert [found.flat() for found in each] == [again.flat()] * 2
    assert pooled["accuracy_trained_n"] == 60  # the same run twice: the same figures, and no narrower an interval
    assert {name: value for name, value in pooled.items() if not name.endswith("_n") and name != "tasks"} == (
        pytest.approx({n: v for n, v in again.flat().items() if not n.endswith("_n") and n != "tasks"})
    )


def test_held_out_graphs_are_none_of_training() -> None:
    config = small(rounds=3)
    seen = {
        edge for number in range(3) for world in graph_match.worlds_of(config, number) for edge in world.graph.triples
    }
    items = graph_panel.held_out(config, 40)
    assert [item.key for item in graph_panel.held_out(config, 40)] == [item.key for item in items]
    assert {item.task.query.length for item in items} == {1, 2, 3}
    # Numbers stand for other nodes in other graphs: single edges may look alike, whole graphs do not.
    shared = [len(set(item.world.graph.triples) & seen) / len(item.world.graph.triples) for item in items]
    assert max(shared) < 0.5
    for item in items:
        assert item.task.answer[0] not in item.task.question.split()
        assert set(item.task.evidence) <= set(item.context)
