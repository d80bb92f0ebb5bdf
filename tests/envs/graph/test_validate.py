"""The fifteen black-box cases of the specification, each with its family, and the validator's holes of its section 7c."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_fixtures import document, graph, graphs, nfd, path, text, trace
from sparring.envs.graph.completion import Completion, read_answer, read_answer_leniently, read_completion
from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import STAGES, Code, Query, Triple
from sparring.envs.graph.solver import path_queries, random_query, solve
from sparring.envs.graph.text import question_text
from sparring.envs.graph.validate import Limits, TaskPool, Verdict, validate_text

T = [("a_1", "r", "b_1"), ("b_1", "s", "c_1")]


def verdict(g: KnowledgeGraph | None = None, **fields: Any) -> Verdict:
    return validate_text(text(**fields), g or graph(), id="t")


def places(found: Verdict) -> list[tuple[str, int | None]]:
    return [(finding.code.value, finding.index) for finding in found.findings]


def test_case_1_as_is() -> None:
    found = verdict()
    assert found.valid and found.stage == STAGES and found.unique_derivation
    assert (
        found.task is not None and found.task.answer == ("c_1",) and found.task.evidence == tuple(Triple(*e) for e in T)
    )


def test_case_2_ambiguous() -> None:
    found = verdict(graph(("b_1", "s", "c_2")))
    assert found.codes == ("ambiguous_answer",) and "c_2" in found.findings[0].detail
    whole = validate_text(
        json.dumps({
            "question": "set a_1 r s", "answer": ["c_2", "c_1"], "task_type": "set",
            "query": {"kind": "set", "start": "a_1", "hops": ["r", "s"]},
            "supporting_edges": [dict(zip(("src", "rel", "dst"), e, strict=True)) for e in [*T, ("b_1", "s", "c_2")]],
        }), graph(("b_1", "s", "c_2")), id="t",
    )  # fmt: skip
    assert whole.valid and whole.task is not None and whole.task.answer == ("c_1", "c_2")


def test_case_3_a_triple_listed_twice_is_one() -> None:
    assert verdict(graph(("b_1", "s", "c_1"))).valid
    assert verdict(graph(("b_1", "s", " c_1\u00a0"))).valid
    assert verdict(edges=[*T, T[1]]).codes == ("cycle", "repeated_edge") or not verdict(edges=[*T, T[1]]).valid


def test_case_4_two_derivations_of_one_answer() -> None:
    found = verdict(graph(("a_1", "r", "b_2"), ("b_2", "s", "c_1")))
    assert found.valid and found.unique_derivation is False


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_case_5_cycles_have_their_own_code(length: int) -> None:
    ring = [(f"k_{i}", "r", f"k_{(i + 1) % length}") for i in range(length)]
    found = validate_text(json.dumps(document(ring)), graph(*ring), id="t")
    assert places(found) == [("cycle", length - 1)]


@pytest.mark.parametrize("answer", ["user_1", "user_5x", "12", "r"])
def test_case_6_an_answer_within_a_longer_id_leaks_nothing(answer: str) -> None:
    edges = [("user_12", "rel_12", "user_5"), ("user_5", "has_r", answer)]
    assert verdict(graph(*edges), edges=edges).valid


@pytest.mark.parametrize("spoil", [" c_1", " (C_1)", "\u00a0c_1.", " c_1?"])
def test_case_7_real_leakage(spoil: str) -> None:
    found = verdict(question=document()["question"] + spoil)
    assert found.codes == ("answer_leakage", "question_mismatch")


def test_case_8_the_same_task_however_worded_and_no_other() -> None:
    g = graph(("a_1", "r", "é"), ("b_9", "s", "c_9"), ("a_1", "connected_to", "b_1"), ("b_1", "connected_to", "c_1"),
              ("b_1", "works_at", "o_1"), base=[])  # fmt: skip
    edges = [("a_1", "r", "é")]
    question = document(edges)["question"]
    pool = TaskPool()
    wordings = [question, question.replace(" ", "  "), question.upper(), question.replace(" ", "\u00a0"), nfd(question)]
    found = [verdict(g, edges=edges, question=wording) for wording in wordings]
    assert all(v.valid for v in found)
    assert [pool.admit(v.task) for v in found if v.task] == [True, False, False, False, False]
    one = verdict(g, edges=[("a_1", "connected_to", "b_1"), ("b_1", "works_at", "o_1")])
    other = verdict(g, edges=[("a_1", "connected_to", "b_1"), ("b_1", "connected_to", "c_1")])
    assert one.task and other.task and pool.admit(one.task) and pool.admit(other.task)


def test_case_9_relations_in_another_order_are_another_task() -> None:
    g = graph(("a_1", "s", "b_2"), ("b_2", "r", "c_3"))
    one, other = verdict(g), verdict(g, edges=[("a_1", "s", "b_2"), ("b_2", "r", "c_3")])
    assert one.task and other.task
    pool = TaskPool([one.task])
    assert pool.admit(other.task)


@pytest.mark.parametrize(
    "name", ["Łukasz", "東京", "Ünïted Ärab", "a -> b", "x, which entity", "Inc.", "q\u0327", "{}"]
)
def test_case_10_unicode_and_signs(name: str) -> None:
    edges = [("Zoë", "ami_de", name), (name, "知る", "Ελλάδα")]
    g = graph(*edges)
    assert verdict(g, edges=edges).valid
    assert validate_text(nfd(text(edges=edges)), g, id="t").valid
    assert verdict(g, edges=[edges[0]]).task is not None


@pytest.mark.parametrize(
    ("edges", "place"),
    [
        ([("a_1", "r", "b_1"), ("b_1", "s", "d_1")], ("unseen_edge", 1)),
        ([("a_1", "r", "q_9"), ("q_9", "s", "c_1")], ("unseen_node", 0)),
        ([T[1], T[0]], ("non_contiguous", 1)),
        ([*T, ("x", "y", "z")], ("extra_edge", 2)),
        ([T[0], ("x", "y", "z"), T[1]], ("extra_edge", 1)),
        ([T[0], T[0], T[1]], ("repeated_edge", 1)),
    ],
)
def test_case_11_each_fault_of_edges_has_its_code_and_index(edges: Any, place: tuple[str, int]) -> None:
    found = verdict(edges=edges, answer="c_1")
    assert place in places(found) and not found.valid


def changed(calls: list[dict[str, Any]], index: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**call, **fields} if i == index else call for i, call in enumerate(calls)]


def test_case_12_lying_traces_are_found_at_the_call() -> None:
    calls = trace(graph(), T)
    assert [c["tool_name"] for c in calls] == [
        "enumerate_neighbors", "enumerate_neighbors", "trace_path", "select_answer", "emit_question",
    ]  # fmt: skip
    assert verdict(tool_trace=calls).valid
    lies = [
        (changed(calls, 0, output={"neighbors": [{"src": "a_1", "rel": "r", "dst": "q"}]}), ("trace_wrong_output", 0)),
        (changed(calls, 1, output=None), ("trace_wrong_output", 1)),
        (changed(calls, 2, output={"path": []}), ("trace_wrong_output", 2)),
        (changed(calls, 3, output={"answer": "WRONG"}), ("trace_wrong_output", 3)),
        (changed(calls, 4, output={"question": "?"}), ("trace_wrong_output", 4)),
        (changed(calls, 1, tool_name="_index"), ("trace_unknown_tool", 1)),
        (changed(calls, 2, args={"path": 5}), ("trace_wrong_call", 2)),
        (calls[::-1], ("trace_wrong_call", 0)),
        (calls[:-1], ("trace_incomplete", 4)),
        ([*calls, calls[0]], ("trace_wrong_call", 5)),
    ]
    for lie, place in lies:
        found = verdict(tool_trace=lie)
        assert place in places(found) and not found.valid


def test_a_trace_may_use_the_other_names_of_its_keys() -> None:
    calls = [{"tool": c["tool_name"], "args": c["args"], "result": c["output"]} for c in trace(graph(), T)]
    assert verdict(tool_trace=calls).valid


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"tool_trace": [{"tool_name": "trace_path", "args": {"path": 5}}]}, "trace_wrong_call"),
        ({"tool_trace": 7}, "schema"),
        ({"canonical_graph": {"nodes": None, "edges": []}}, "schema"),
        ({"canonical_graph": []}, "schema"),
        ({"supporting_edges": [{"src": "a_1", "rel": "r", "dst": "b_1", "confidence": "high"}]}, "schema"),
        ({"supporting_edges": {"src": "a_1"}}, "schema"),
        ({"supporting_edges": [None]}, "schema"),
        ({"supporting_edges": []}, "missing_edges"),
        ({"answer": {"a": 1}}, "schema"),
        ({"answer": True}, "schema"),
        ({"answer": ""}, "missing_answer"),
        ({"question": None}, "missing_question"),
        ({"question": "\ud800"}, "not_text"),
        ({"query": {"kind": "magic"}}, "schema"),
        ({"query": {"kind": "path", "start": "a_1", "hops": []}}, "schema"),
        ({"task_type": "count"}, "query_mismatch"),
    ],
)
def test_case_13_hostile_types(fields: dict[str, Any], code: str) -> None:
    found = validate_text(json.dumps(document(**fields)), graph(), id="t")
    assert code in found.codes and not found.valid


def test_case_13_what_is_harmless() -> None:
    assert verdict(answer=["c_1"]).valid
    assert verdict(orchestrator={"spawn_count": "none"}).valid  # what a reply says of itself is not read at all
    years = [("a_1", "r", "2002")]
    assert verdict(graph(*years, base=[]), edges=years, answer=2002).valid
    assert verdict(graph(*years, base=[]), edges=years, answer=2002.0).valid
    for word in ("NaN", "Infinity", "-Infinity"):
        assert validate_text(text().replace("1.0", word), graph(), id="t").codes == ("not_finite",)
    assert validate_text(text().replace("1.0", "1e999"), graph(), id="t").codes == ("not_finite",)
    assert not validate_text(text().replace("1.0", "1" * 9000), graph(), id="t").valid


def test_case_14_json_in_any_dress() -> None:
    plain = text()
    example = json.dumps({"question": "q", "answer": "a", "task_type": "path", "supporting_edges": []})
    for dressed in (
        f"```json\n{plain}\n```", f"Use {{braces}} so: {plain} done {{}}", f"{example}\n{plain}", f"[{plain}]",
        f"An open {{ brace. {plain}", f'{{"answer": "no"}} {plain}', plain + "}",
    ):  # fmt: skip
        assert validate_text(dressed, graph(), id="t").valid, dressed
    assert validate_text(plain.replace('"path"', '"path",,'), graph(), id="t").codes == ("invalid_json",)
    assert validate_text(plain.replace("}]", "},]"), graph(), id="t").codes == ("invalid_json",)
    assert validate_text(plain.replace('"', "'"), graph(), id="t").codes == ("invalid_json",)
    assert validate_text("no task today", graph(), id="t").codes == ("no_json",)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.999])
def test_case_14_cut_anywhere_is_truncated_and_never_an_answer(share: float) -> None:
    plain = text()
    cut = plain[: max(1, int(share * len(plain)))]
    read = read_completion(cut)
    assert not isinstance(read, Completion)
    assert [finding.code for finding in read] == [Code.TRUNCATED_JSON]
    assert read_answer(cut) is None


@settings(deadline=None)
@given(st.integers(1, len(text()) - 1))
def test_every_prefix_is_truncated(length: int) -> None:
    assert validate_text(text()[:length], graph(), id="t").codes == ("truncated_json",)


# ------------------------------------------------------------------------------------------------------ whole families


KEYS = ["src", "rel", "dst", "nodes", "edges", "kind", "start", "hops", "tool_name", "args", "output", "confidence"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["a_1", "r", "b_1", "c_1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
FIELDS = ["question", "answer", "task_type", "supporting_edges", "query", "tool_trace", "canonical_graph"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_no_value_in_any_field_raises(fields: dict[str, Any]) -> None:
    found = validate_text(json.dumps(document(**fields)), graph(), id="t")
    assert found.valid == (not found.findings) and 0 <= found.stage <= STAGES
    assert found.valid == (found.stage == STAGES)


@settings(deadline=None)
@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")) | st.text(alphabet='{}[]":,\\ansrdt1', max_size=80))
def test_no_text_raises(raw: str) -> None:
    for dressed in (raw, text() + raw, raw + text(), '{"answer": ' + raw):
        validate_text(dressed, graph(), id="t")
        read_answer(dressed)
        read_answer_leniently(dressed)


@pytest.mark.parametrize("bomb", ['{"question":' * 3000, "[" * 50_000, "{" * 60_000, '{"a":"' + "x{" * 40_000])
def test_bombs(bomb: str) -> None:
    assert not validate_text(bomb, graph(), id="t").valid
    assert not validate_text(text(tool_trace=[]).replace("[]", '{"a":' * 400 + "1" + "}" * 400), graph(), id="t").valid


@settings(deadline=None)
@given(graphs)
def test_every_task_of_the_budget_is_valid_and_every_other_path_is_not(g: KnowledgeGraph) -> None:
    """A second implementation: all forward walks by enumeration, judged by hand-written rules."""
    budget = set(path_queries(g, 2))
    for first in g.triples:
        for chain in ([first], *([first, second] for second in g.out_edges(first.dst))):
            query = path(chain[0].src, *(edge.rel for edge in chain))
            walks = [[e] for e in g.triples if e.src == query.start and e.rel == query.hops[0].relation]
            for hop in query.hops[1:]:
                walks = [[*w, e] for w in walks for e in g.triples if e.src == w[-1].dst and e.rel == hop.relation]
            ends = {walk[-1].dst for walk in walks}
            nodes = [chain[0].src, *(edge.dst for edge in chain)]
            right = len(ends) == 1 and len(set(nodes)) == len(nodes)
            found = validate_text(json.dumps(document([tuple(e) for e in chain])), g, id="t")
            assert found.valid == right, (chain, found.codes)
            if right:
                assert query in budget


@settings(deadline=None)
@given(graphs, st.randoms(use_true_random=False), st.sampled_from(["path", "set", "count", "intersection"]))
def test_what_the_solver_says_is_valid_and_any_other_answer_is_not(g: KnowledgeGraph, rng: Any, kind: Any) -> None:
    from sparring.envs.graph.solver import make_task

    query = random_query(g, rng, kind=kind, hops=rng.randint(1, 3))
    task = None if query is None else make_task(g, query, id="t")
    if task is None:
        return
    said = claim(task.query, list(task.answer), [tuple(e) for e in task.evidence])
    found = validate_text(json.dumps(said), g, id="t", limits=Limits(max_edges=99))
    assert found.valid and found.task is not None and found.task.answer == solve(g, task.query)
    wrong = {**said, "answer": [*task.answer, "n_99"]}
    assert validate_text(json.dumps(wrong), g, id="t", limits=Limits(max_edges=99)).codes == ("wrong_answer",)
    extra = [edge for edge in g.triples if edge not in task.evidence]
    if extra:
        more = claim(task.query, list(task.answer), [*map(tuple, task.evidence), tuple(extra[0])])
        assert not validate_text(json.dumps(more), g, id="t", limits=Limits(max_edges=99)).valid


def claim(query: Query, answer: list[str], edges: list[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"kind": query.kind, "start": query.start, "hops": list(map(str, query.hops))}
    if query.kind == "intersection":
        said |= {"other_start": query.other_start, "other_hops": list(map(str, query.other_hops))}
    return {
        "question": question_text(query, full=True), "answer": answer, "task_type": query.kind, "query": said,
        "supporting_edges": [dict(zip(("src", "rel", "dst"), edge, strict=True)) for edge in edges],
    }  # fmt: skip


def test_a_fabricated_canonical_graph_is_refused() -> None:
    own = {"nodes": ["a_1", "b_1", "c_1"], "edges": document()["supporting_edges"]}
    assert verdict(canonical_graph=own).valid
    assert verdict(canonical_graph={**own, "nodes": ["a_1", "q"]}).codes == ("fabricated_graph",)
    forged = {**own, "edges": [*own["edges"], {"src": "a_1", "rel": "t", "dst": "c_1"}]}
    assert ("fabricated_graph", 2) in places(verdict(canonical_graph=forged))
    assert verdict(canonical_graph={**own, "edges": own["edges"][:1]}).codes == ("missing_edge",)


def test_limits() -> None:
    chain = [(f"k_{i}", "r", f"k_{i + 1}") for i in range(8)]
    g = graph(*chain)
    assert validate_text(text(edges=chain[:6]), g, id="t").valid
    assert validate_text(text(edges=chain[:7]), g, id="t").codes == ("too_many_hops",)
    assert "too_many_edges" in validate_text(text(edges=chain[:3]), g, id="t", limits=Limits(max_edges=2)).codes


def test_inverse_hops() -> None:
    said = claim(path("c_1", "^s", "^r"), ["a_1"], [("b_1", "s", "c_1"), ("a_1", "r", "b_1")])
    assert validate_text(json.dumps(said), graph(), id="t").valid
    wrong = claim(path("c_1", "^s", "r"), ["a_1"], [("b_1", "s", "c_1"), ("a_1", "r", "b_1")])
    assert not validate_text(json.dumps(wrong), graph(), id="t").valid


def test_answers_read_strictly_and_leniently() -> None:
    assert read_answer('{"answer": "c_1"}') == read_answer(' {"answer": ["c_1", "c_1"]}\n')
    for dressed in (
        'So {"answer": "c_1"}',
        '```{"answer":"c_1"}```',
        '{"answer": "c_1", "note": "cut of',
        "Answer: c_1",
    ):
        assert read_answer(dressed) is None
        found = read_answer_leniently(dressed)
        assert found is not None and found.answer == ("c_1",), dressed
    assert read_answer_leniently("I do not know") is None
