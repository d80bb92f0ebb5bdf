"""One attempt at a task: the question with a shuffled context, or with tools over several turns. The answer stays inside.

Of a task only question, id, kind and hop count are ever shown; facts come out after the last turn, for the reward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparring.envs.graph.completion import Answer, find_object, read_answer
from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.prompts import ANSWERER_FULL, answerer_prompt
from sparring.envs.graph.records import AnswerFacts, Finding, Task, Triple
from sparring.envs.graph.tools import Desk, call_tool, tool_schemas
from sparring.envs.graph.views import World

SHOWN_RESULTS = 5
"""Newest results of tools that a prompt repeats."""
RESULT_CHARACTERS = 600


class Attempt:
    """An attempt in the making.

    Attributes:
        done: No further turn is taken.
        steps: Turns taken.
    """

    def __init__(
        self, world: World, task: Task, *, context: tuple[Triple, ...], tools: bool, full: bool, max_steps: int
    ) -> None:
        """``max_steps`` counts turns with tools; with a context there is one."""
        self.task, self.tools, self.full = task, tools, full
        self.graph: KnowledgeGraph = world.graph
        self.context = context
        self.max_steps = max_steps if tools else 1
        self.desk = Desk(views=world.views, context=context)
        self.steps, self.done = 0, False
        self._answer: Answer | None = None
        self._history: list[tuple[str, str]] = []

    def prompt(self) -> tuple[str, str]:
        """(system, user) of the next turn."""
        if not self.tools:
            return answerer_prompt(self.task.question, self.context, full=self.full)
        names = json.dumps([tool["function"] for tool in tool_schemas()], separators=(",", ":")) if self.full else ""
        system = (
            f"{ANSWERER_FULL if self.full else 'Tools.'}{names and ' To look something up, reply '}{names and _CALL}"
        )
        turns = [f"> {asked[:200]}\n{shown}" for asked, shown in self._history[-SHOWN_RESULTS:]]
        return f"{system}{names}", "\n".join([self.task.question, *turns, f"turn {self.steps + 1} of {self.max_steps}"])

    def take(self, text: str) -> None:
        """One reply. Any text is a turn; one that is neither a call nor an answer changes nothing."""
        self.steps += 1
        answer = read_answer(text)
        if answer is not None:
            self._answer = answer
        elif self.tools:
            self._call(text)
        self.done = self._answer is not None or self.steps >= self.max_steps

    def _call(self, text: str) -> None:
        document = find_object(text, ("tool_name",))
        if isinstance(document, Finding):
            self._history.append((text, f"no call and no answer: {document.code.value}"))
            return
        result = call_tool(self.desk, document.get("tool_name"), document.get("args"))
        shown = json.dumps(result.output if result.ok else {"error": result.error}, ensure_ascii=False)
        self._history.append((json.dumps(document, ensure_ascii=False), shown[:RESULT_CHARACTERS]))
        if self.desk.answer is not None:
            self._answer = Answer(answer=self.desk.answer, edges=tuple(self.desk.edges))

    def facts(self) -> AnswerFacts:
        """What came of it. Edges count whether the answer named them or ``add_edge`` noted them."""
        said = self._answer
        edges = (*self.desk.edges, *(said.edges if said is not None else ()))
        return AnswerFacts(
            parsed=said is not None, correct=said is not None and self.task.accepts(said.answer),
            evidence_f1=evidence_f1(edges, self.task.evidence), steps=max(1, self.steps), max_steps=self.max_steps,
        )  # fmt: skip


_CALL = '{"tool_name": NAME, "args": {...}}. Tools: '


def evidence_f1(named: Sequence[Triple], evidence: Sequence[Triple]) -> float:
    """F1 of the edges named (each once) against the evidence; every edge counts, however many there are.

    >>> evidence_f1([Triple("a", "r", "b")], [Triple("a", "r", "b"), Triple("b", "s", "c")])
    0.6666666666666666
    """
    mine, gold = set(named), set(evidence)
    hits = len(mine & gold)
    return 2 * hits / (len(mine) + len(gold)) if hits else 0.0
