"""Worlds, MetaQA files, contexts without a positional leak, tools that nothing can break, the solver against enumeration."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_fixtures import graph, graphs, hop_lists, path
from sparring.envs.graph.episode import Attempt, TeamLimits, evidence_f1
from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.metaqa import read_graph, read_questions, task_of
from sparring.envs.graph.prompts import answer_json, context_of
from sparring.envs.graph.records import Hop, Query, Task, Telemetry, Triple
from sparring.envs.graph.solver import (
    derivations,
    evidence,
    guess_chance,
    make_task,
    path_queries,
    random_tasks,
    reached,
    solve,
    task_budget,
)
from sparring.envs.graph.tools import LOOKUPS, TOOLS, Desk, call_tool, tool_schemas
from sparring.envs.graph.views import World, plain_views
from sparring.envs.graph.worlds import make_world
from sparring.errors import ConfigError, EnvError

SMALL: dict[str, Any] = {}
LARGE: dict[str, Any] = {"users": 40, "posts": 20, "threads": 8, "events": 4, "ids": "typed"}


def walks(g: KnowledgeGraph, start: str, hops: Any) -> list[list[Triple]]:
    """By enumeration: the second implementation."""
    found: list[tuple[str, list[Triple]]] = [(start, [])] if start in g.nodes else []
    for hop in hops:
        further = []
        for node, way in found:
            for edge in g.triples:
                begin, end = (edge.dst, edge.src) if hop.inverse else (edge.src, edge.dst)
                if edge.rel == hop.relation and begin == node:
                    further.append((end, [*way, edge]))
        found = further
    return [[*way] for _, way in found]


@settings(deadline=None)
@given(graphs, hop_lists)
def test_the_solver_agrees_with_enumeration(g: KnowledgeGraph, hops: Any) -> None:
    query = Query(kind="set", start="n_0", hops=tuple(hops))
    all_walks = walks(g, "n_0", hops)
    ends = {(way[-1].src if hops[-1].inverse else way[-1].dst) for way in all_walks}
    assert reached(g, "n_0", hops) == ends
    assert solve(g, query) == tuple(sorted(ends))
    assert solve(g, Query(kind="count", start="n_0", hops=tuple(hops))) == (str(len(ends)),)
    assert evidence(g, query) == {edge for way in all_walks for edge in way}
    assert derivations(g, query) == len(all_walks)


def test_guess_chance_by_hand() -> None:
    g = graph(("a", "r", "x"), ("b", "r", "x"), ("c", "r", "z"), base=[])
    assert guess_chance(g, path("a", "r")) == pytest.approx(2 / 3)
    assert guess_chance(g, path("c", "r")) == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", ["path", "set", "count", "intersection"])
def test_tasks_of_every_kind_up_to_six_hops(kind: Any) -> None:
    world = make_world("investigation", LARGE, split="train", seed=0, number=0)
    tasks = random_tasks(world.graph, Random(1), 12, kinds=(kind,), hops=(1, 2, 3, 4, 5, 6), inverse=True)
    assert {task.query.length for task in tasks} >= {1, 2, 3, 4, 5, 6}
    for task in tasks:
        assert task.answer == solve(world.graph, task.query)
        assert set(task.evidence) <= evidence(world.graph, task.query)
        assert len(task.answer) == 1 or kind in ("set", "intersection")


def test_the_budget_counts_what_can_be_asked() -> None:
    assert task_budget(graph(), 3) == {1: 4, 2: 2, 3: 1}
    assert task_budget(graph(("b_1", "s", "c_2")), 2) == {1: 3, 2: 1}  # b_1 s and a_1 r s are ambiguous now
    assert len(list(path_queries(graph(), 3))) == 7


def test_worlds_are_repeatable_and_splits_differ() -> None:
    for settings_ in (LARGE, SMALL):
        one = make_world("investigation", settings_, split="train", seed=0, number=0)
        again = make_world("investigation", settings_, split="train", seed=0, number=0)
        other = make_world("investigation", settings_, split="test", seed=0, number=0)
        assert one.graph.triples == again.graph.triples != other.graph.triples
        assert one.views == again.views
    types = Counter(
        node.type for node in make_world("investigation", LARGE, split="train", seed=0, number=0).graph.nodes.values()
    )
    assert set(types) == {"user", "alias", "org", "location", "post", "thread", "event"}


def test_noise_is_in_the_views_and_not_in_the_graph() -> None:
    clean = {**LARGE, "noise_level": 0.0, "alias_noise": 0.0, "red_herring_rate": 0.0}
    loud = {**LARGE, "noise_level": 1.0, "alias_noise": 1.0, "red_herring_rate": 1.0}
    quiet, noisy = (make_world("investigation", s, split="train", seed=0, number=0) for s in (clean, loud))
    assert quiet.graph.triples == noisy.graph.triples
    assert all("Rumor" in post.text for post in noisy.views.posts.values())
    assert not any("Rumor" in post.text for post in quiet.views.posts.values())
    assert len(noisy.views.profiles) == 2 * len(quiet.views.profiles)


def test_bad_settings_name_the_field() -> None:
    with pytest.raises(ConfigError, match=r"world_settings\.user is unknown .*users"):
        make_world("investigation", {"user": 3}, split="train", seed=0, number=0)
    with pytest.raises(ConfigError, match=r"world_settings\.noise_level is 2"):
        make_world("investigation", {"noise_level": 2.0}, split="train", seed=0, number=0)
    with pytest.raises(ConfigError, match="at most 90"):
        make_world("investigation", {"users": 90}, split="train", seed=0, number=0)
    with pytest.raises(ConfigError, match="did you mean 'geonames'"):
        make_world("geoname", {}, split="train", seed=0, number=0)
    with pytest.raises(ConfigError, match="root"):
        make_world("metaqa", {}, split="train", seed=0, number=0)


def test_geonames_holds_countries_out() -> None:
    train, test = (make_world("geonames", {}, split=s, seed=0, number=0).graph for s in ("train", "test"))
    countries = [{n.id for n in g.nodes.values() if n.type == "country"} for g in (train, test)]
    assert countries[0] and countries[1] and not countries[0] & countries[1]
    assert sum(task_budget(train, 3).values()) > 200


def test_metaqa(tmp_path: Path) -> None:
    (tmp_path / "kb.txt").write_text("Kismet|directed_by|William Dieterle\nKismet|has_genre|Drama\nHeat|directed_by|Mann\n"
                                     "Thief|directed_by|Mann\nHeat|written_by|Mann\n")  # fmt: skip
    folder = tmp_path / "2-hop" / "vanilla"
    folder.mkdir(parents=True)
    (folder / "qa_test.txt").write_text("what films share a director with [Heat]\tHeat|Thief\n")
    (tmp_path / "2-hop" / "qa_test_qtype.txt").write_text("movie_to_director_to_movie\n")
    g = read_graph(tmp_path)
    (question,) = read_questions(tmp_path, "test", 2)
    task = task_of(g, question, id="q")
    assert task is not None and task.query.hops == (
        Hop(relation="directed_by"),
        Hop(relation="directed_by", inverse=True),
    )
    assert task.accepts(("Thief",)) and task.accepts(("Heat",)) and task.accepts(("Thief", "Heat"))
    assert not task.accepts(("Mann",)) and not task.accepts(("Heat", "Mann")) and not task.accepts(None)
    assert task.evidence == (Triple("Heat", "directed_by", "Mann"), Triple("Thief", "directed_by", "Mann"))
    (folder / "qa_test.txt").write_text("no topic\tHeat\n")
    with pytest.raises(EnvError, match=r"qa_test\.txt:1"):
        read_questions(tmp_path, "test", 2)
    (tmp_path / "kb.txt").write_text("a|b\n")
    with pytest.raises(EnvError, match=r"kb\.txt:1"):
        read_graph(tmp_path)


# -------------------------------------------------------------------------------------------------------- no leaks


def test_no_place_of_the_context_gives_the_answer_away() -> None:
    """The second shown edge ends in the answer no more often than any other: about one in eight."""
    world = make_world("investigation", SMALL, split="train", seed=0, number=0)
    places: Counter[int] = Counter()
    second = 0
    tasks = random_tasks(world.graph, Random(0), 60, hops=(2, 3))
    for task in tasks:
        for repeat in range(10):
            context = context_of(world.graph, task, Random(f"{task.id}/{repeat}"), edges=8)
            assert set(task.evidence) <= set(context) <= set(world.graph.triples) and len(context) == 8
            places[context.index(task.evidence[-1])] += 1
            second += context[1].dst == task.answer[0]
    expected = sum(places.values()) / 8
    assert all(abs(count - expected) < 5 * expected**0.5 for count in places.values()), places
    assert second / sum(places.values()) < 0.3


def test_distractors_leave_the_answer_alone() -> None:
    world = make_world("investigation", LARGE, split="train", seed=3, number=0)
    for task in random_tasks(world.graph, Random(0), 30, kinds=("path", "set", "count"), hops=(1, 2, 3)):
        context = context_of(world.graph, task, Random(task.id), edges=24)
        assert solve(KnowledgeGraph(context), task.query) == task.answer


SECRET = Task(
    id="t", query=path("a_1", "r", "s"), question="path a_1 r s", answer=("c_1",), evidence=(Triple("a_1", "r", "b_1"),)
)


def attempt(*, tools: bool, max_steps: int = 4) -> Attempt:
    g = graph(base=[Triple("a_1", "r", "b_1"), Triple("q", "s", "w")])
    return Attempt(
        World(name="w", graph=g, views=plain_views(g)), SECRET, context=tuple(g.triples), tools=tools, full=True,
        max_steps=max_steps,
    )  # fmt: skip


@pytest.mark.parametrize("tools", [True, False])
def test_the_answer_is_in_no_observation(tools: bool) -> None:
    playing = attempt(tools=tools)
    texts = ["".join(playing.prompt())]
    for name in (*TOOLS, "_index", "call", "__init__", None):
        if playing.done or not tools:
            break
        playing.agent.max_steps = 99
        playing.take(json.dumps({"tool_name": name, "args": {"query": "", "k": 99}}))
        texts.append("".join(playing.prompt()))
    assert not any("c_1" in text for text in texts)


def test_an_attempt_with_tools() -> None:
    playing = attempt(tools=True)
    playing.take('{"tool_name": "search_posts", "args": {"query": "a_1"}}')
    assert "a_1 r b_1" in playing.prompt()[1] and not playing.done
    playing.take('{"tool_name": "add_edge", "args": {"src": "a_1", "rel": "r", "dst": "b_1"}}')
    playing.take('{"tool_name": "submit_answer", "args": {"answer": "c_1"}}')
    facts = playing.facts()
    assert playing.done and facts.correct and facts.parsed and facts.evidence_f1 == 1.0 and facts.steps == 3
    silent = attempt(tools=True, max_steps=2)
    silent.take("hm")
    silent.take("hm")
    assert silent.done and not silent.facts().parsed and not silent.facts().correct


def test_sub_agents_really_run_and_are_measured() -> None:
    g = graph(base=[Triple("a_1", "r", "b_1"), Triple("q", "s", "w")])
    playing = Attempt(
        World(name="w", graph=g, views=plain_views(g)), SECRET, context=(), tools=True, full=True, max_steps=5,
        team=TeamLimits(agents=3, steps=2),
    )  # fmt: skip
    assert "spawn" in playing.prompt()[0] and playing.ready() == [0] and playing.facts().telemetry is None
    playing.take('{"tool_name": "spawn", "args": {"questions": ["who is a_1?", "and q?"]}}')
    assert playing.ready() == [1, 2] and "who is a_1?" in playing.prompt(1)[1] and "spawn" not in playing.prompt(1)[0]
    playing.take('{"tool_name": "search_posts", "args": {"query": "a_1"}}', 1)
    playing.take('{"answer": "w"}', 2)
    assert playing.ready() == [1]
    playing.take("hm", 1)  # out of turns without an answer
    assert playing.ready() == [0] and "and q?\nw" in playing.prompt()[1] and "no answer" in playing.prompt()[1]
    playing.take('{"tool_name": "spawn", "args": {"questions": ["x", "y", "z"]}}')
    assert playing.ready() == [3]  # one was left
    playing.take('{"tool_name": "spawn", "args": {"questions": ["deeper"]}}', 3)  # sub-agents spawn none
    assert playing.ready() == [3] and len(playing.helpers) == 3
    playing.take('{"answer": "b_1"}', 3)
    playing.take('{"answer": "c_1", "orchestrator": {"spawn_count": 99}}')
    facts = playing.facts()
    assert playing.ready() == [] and facts.correct
    assert facts.telemetry == Telemetry(spawned=3, finished=2, critical_steps=1 + 2 + 1 + 2 + 1, breadth=2, depth=1)


def test_an_attempt_with_a_context_has_one_turn() -> None:
    playing = attempt(tools=False)
    playing.take(answer_json(("c_1",), SECRET.evidence))
    assert playing.done and playing.facts().correct and playing.facts().evidence_f1 == 1.0
    other = attempt(tools=False)
    other.take("The answer is c_1")
    assert other.done and not other.facts().parsed


def test_edge_spam_lowers_the_score() -> None:
    spam = [Triple(f"x{i}", "r", "y") for i in range(17)]
    assert evidence_f1([*spam, *SECRET.evidence], SECRET.evidence) == pytest.approx(2 / 19)
    assert evidence_f1(spam, SECRET.evidence) == 0.0


# ---------------------------------------------------------------------------------------------------------------- tools


def test_twelve_lookups_have_schemas() -> None:
    assert len(LOOKUPS) == 12 and len(tool_schemas()) == 14
    by_name = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tool_schemas()}
    assert set(by_name["search_posts"]["properties"]) == {"query", "time_range"}
    assert by_name["add_edge"]["required"] == ["src", "rel", "dst"]
    assert all(schema["type"] == "object" for schema in by_name.values())


def test_what_each_lookup_finds() -> None:
    clean = {**LARGE, "noise_level": 0.0, "alias_noise": 0.0}
    views = make_world("investigation", clean, split="train", seed=0, number=0).views
    alias, owner = next(iter(views.owners.items()))
    desk = Desk(views=views, context=(Triple("a", "r", "b"),))

    def call(tool: str, **args: Any) -> Any:
        result = call_tool(desk, tool, args)
        assert result.ok, result.error
        return result.output

    assert call("get_profile", user_id=alias)["user_id"] == owner
    assert call("get_user_posts", user_id=alias) == call("get_user_posts", user_id=owner)
    assert call("search_posts", query=owner)["count"] >= 1
    assert call("search_posts", query=owner, time_range=[0, 1])["count"] == 0
    assert call("search_posts", query="")["count"] == 0
    assert call("get_post", post_id="post_0")["post_id"] == "post_0"
    assert call("get_mentions", user_id=owner)["count"] >= 1
    thread = next(iter(views.threads.values()))
    assert thread.thread_id in [t["thread_id"] for t in call("search_threads", topic=thread.topic)["results"]]
    assert call("get_thread", thread_id=thread.thread_id)["title"] == thread.title
    assert thread.thread_id in call("get_user_activity", user_id=thread.author)["threads"]
    assert call("search_people", name="Person 1")["count"] >= 1 and call("search_people")["count"] == 0
    assert isinstance(call("get_connections", user_id=owner), list)
    assert call("search_shared_context", query="a r") == ["a r b"] and call("search_shared_context", query=" ") == []
    assert (
        "get_thread" in call("search_memory", query="get_thread")[0]
        and len(call("search_memory", query="get_post", k=1)) == 1
    )


ARGUMENTS = st.sampled_from(["query", "k", "user_id", "src", "rel", "dst", "confidence", "answer", "post_id", "topic"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)


@settings(deadline=None)
@given(
    st.sampled_from([*TOOLS, "_index", "call", "run", ""]) | st.none() | st.integers(),
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ARGUMENTS, inner, max_size=4)),
)
def test_no_call_raises(name: Any, args: Any) -> None:
    g = graph()
    result = call_tool(Desk(views=plain_views(g)), name, args)
    assert result.ok != bool(result.error)


def test_make_task_refuses_what_is_no_task() -> None:
    ring = graph(("a", "r", "b"), ("b", "s", "a"), base=[])
    assert make_task(ring, path("a", "r", "s"), id="t") is None
    assert make_task(graph(("b_1", "s", "c_2")), path("a_1", "r", "s"), id="t") is None
    assert make_task(graph(), Query(kind="set", start="a_1", hops=(Hop(relation="r"),)), id="t") is None
    assert make_task(graph(), path("nowhere", "r"), id="t") is None
