"""One attempt at a task: the question with a shuffled context, or with tools over several turns. The answer stays inside.

Of a task only question, id, kind and hop count are ever shown; facts come out after the last turn, for the reward. With tools
an answerer may spawn sub-agents, which really run: each takes turns with the same lookups at a question that it was given,
and what it submits comes back. What is paid for them is what is measured here (PARL, Kimi K2.5, arXiv 2602.02276).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sparring.envs.graph.completion import Answer, find_object, read_answer
from sparring.envs.graph.prompts import ANSWERER_FULL, answerer_prompt
from sparring.envs.graph.records import AnswerFacts, Finding, Task, Telemetry, Triple
from sparring.envs.graph.tools import Desk, call_tool, tool_schemas
from sparring.envs.graph.views import Views, World

SHOWN_RESULTS = 5
"""Newest results of tools that a prompt repeats."""
RESULT_CHARACTERS = 600
_CALL = ' To look something up, reply {"tool_name": NAME, "args": {...}}. Tools: '
_SPAWN = ' To let sub-agents look things up at the same time, reply {"tool_name": "spawn", "args": {"questions": [TEXT, ...]}}.'


class Spawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a spawn."""

    questions: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamLimits:
    """How many sub-agents an attempt may spawn; 0 for none. They spawn none themselves.

    >>> TeamLimits().agents
    0
    """

    agents: int = 0
    """In one attempt, all together."""
    steps: int = 4
    """Turns of each."""


class Agent:
    """Somebody who takes turns with tools at a question: an answerer, or a sub-agent of his.

    Attributes:
        answer: What was submitted; None until then.
        steps: Turns taken.
    """

    def __init__(self, desk: Desk, question: str, *, full: bool, max_steps: int, may_spawn: bool) -> None:
        self.desk, self.question, self.full, self.max_steps, self.may_spawn = desk, question, full, max_steps, may_spawn
        self.steps = 0
        self.answer: Answer | None = None
        self.history: list[tuple[str, str]] = []

    @property
    def done(self) -> bool:
        return self.answer is not None or self.steps >= self.max_steps

    def prompt(self) -> tuple[str, str]:
        """(system, user) of the next turn."""
        system = "Tools."
        if self.full:
            tools = json.dumps([tool["function"] for tool in tool_schemas()], separators=(",", ":"))
            system = f"{ANSWERER_FULL}{_SPAWN if self.may_spawn else ''}{_CALL}{tools}"
        turns = [f"> {asked[:200]}\n{shown[:RESULT_CHARACTERS]}" for asked, shown in self.history[-SHOWN_RESULTS:]]
        return system, "\n".join([self.question, *turns, f"turn {self.steps + 1} of {self.max_steps}"])

    def take(self, text: str) -> tuple[str, ...]:
        """One reply; any text is a turn, and one that is neither a call nor an answer changes nothing. Returns the
        questions that sub-agents are wanted for."""
        self.steps += 1
        self.answer = read_answer(text)
        if self.answer is not None:
            return ()
        document = find_object(text, ("tool_name",))
        if isinstance(document, Finding):
            self.history.append((text, f"no call and no answer: {document.code.value}"))
            return ()
        name, args = document.get("tool_name"), document.get("args")
        if name == "spawn" and self.may_spawn:
            try:
                return tuple(msgspec.convert(args, Spawn).questions)
            except msgspec.ValidationError as error:
                self.history.append((text, f"spawn: {error}"))
                return ()
        result = call_tool(self.desk, name, args)
        shown = json.dumps(result.output if result.ok else {"error": result.error}, ensure_ascii=False)
        self.history.append((json.dumps(document, ensure_ascii=False), shown))
        if self.desk.answer is not None:
            self.answer = Answer(answer=self.desk.answer, edges=())
        return ()


class Attempt:
    """An attempt in the making.

    Attributes:
        steps: Turns of the answerer's own.
    """

    def __init__(
        self, world: World, task: Task, *, context: tuple[Triple, ...], tools: bool, full: bool, max_steps: int,
        team: TeamLimits | None = None,
    ) -> None:  # fmt: skip
        """``max_steps`` counts the answerer's own turns with tools; with a context there is one."""
        self.task, self.tools, self.full, self.context = task, tools, full, context
        self.max_steps = max_steps if tools else 1
        self.team = team or TeamLimits()
        self._views: Views = world.views
        self.agent = Agent(
            Desk(views=world.views, context=context), task.question, full=full, max_steps=self.max_steps,
            may_spawn=tools and self.team.agents > 0,
        )  # fmt: skip
        self.helpers: list[Agent] = []
        """Every sub-agent that was spawned, in order."""
        self._critical = self._breadth = self._new = 0

    @property
    def steps(self) -> int:
        return self.agent.steps

    @property
    def done(self) -> bool:
        return self.agent.done

    def ready(self) -> list[int]:
        """Who speaks next, all at the same time: sub-agents 1, 2, ... as long as one has a turn left, else 0, the
        answerer; nobody when the attempt is over."""
        if self.done:
            return []
        return [number for number, helper in enumerate(self.helpers, start=1) if not helper.done] or [0]

    def prompt(self, who: int = 0) -> tuple[str, str]:
        """(system, user) of somebody's next turn."""
        if who:
            return self.helpers[who - 1].prompt()
        return self.agent.prompt() if self.tools else answerer_prompt(self.task.question, self.context, full=self.full)

    def take(self, text: str, who: int = 0) -> None:
        """One reply of somebody who is ready."""
        if who:
            self.helpers[who - 1].take(text)
            if not any(not helper.done for helper in self.helpers):
                self._hear()
        elif self.tools:
            self._critical += 1
            self._spawn(text, self.agent.take(text))
        else:
            self.agent.steps += 1
            self.agent.answer = read_answer(text)

    def _spawn(self, text: str, questions: Sequence[str]) -> None:
        wanted = questions[: self.team.agents - len(self.helpers)]
        if questions and not wanted:
            self.agent.history.append((text, f"no more than {self.team.agents} sub-agents"))
        self._new = len(wanted)
        self._breadth = max(self._breadth, len(wanted))
        self.helpers += [
            Agent(Desk(views=self._views), question[:400], full=self.full, max_steps=self.team.steps, may_spawn=False)
            for question in wanted
        ]

    def _hear(self) -> None:
        """The sub-agents of one spawn have ended: their answers come back, and the slowest counts for the critical path."""
        ended = self.helpers[len(self.helpers) - self._new :]
        self._critical += max(helper.steps for helper in ended)
        for helper in ended:
            said = ", ".join(helper.answer.answer) if helper.answer is not None else "no answer"
            self.agent.history.append((f"sub-agent: {helper.question}", said))

    def facts(self) -> AnswerFacts:
        """What came of it. Edges count whether the answer named them or ``add_edge`` noted them."""
        said = self.agent.answer
        edges = (*self.agent.desk.edges, *(said.edges if said is not None else ()))
        return AnswerFacts(
            parsed=said is not None, correct=said is not None and self.task.accepts(said.answer),
            evidence_f1=evidence_f1(edges, self.task.evidence), steps=max(1, self.steps), max_steps=self.max_steps,
            telemetry=self.telemetry(),
        )  # fmt: skip

    def telemetry(self) -> Telemetry | None:
        """The work of sub-agents as it was; None where none was spawned."""
        if not self.helpers:
            return None
        return Telemetry(
            spawned=len(self.helpers), finished=sum(helper.answer is not None for helper in self.helpers),
            critical_steps=self._critical, breadth=self._breadth, depth=1,
        )  # fmt: skip


def evidence_f1(named: Sequence[Triple], evidence: Sequence[Triple]) -> float:
    """F1 of the edges named (each once) against the evidence; every edge counts, however many there are.

    >>> evidence_f1([Triple("a", "r", "b")], [Triple("a", "r", "b"), Triple("b", "s", "c")])
    0.6666666666666666
    """
    mine, gold = set(named), set(evidence)
    hits = len(mine & gold)
    return 2 * hits / (len(mine) + len(gold)) if hits else 0.0
