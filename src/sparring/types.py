"""The records that cross rooms: frozen, keyword-only, one sentence, shape and unit for each field.

Legend: ``P`` prompt tokens, ``R`` reply tokens, ``T = P + R``. Arrays of one turn are plain tuples, so that this module
needs nothing but the standard library; rooms that compute turn them into tensors once, at their own border. The records
of small policies (``Transition``, ``Rollout``) carry numpy arrays, which this module names but never loads. There ``T``
is steps of one agent, ``D`` features of an observation, ``K`` parts of an action, ``B`` steps to bootstrap from.

The data path: ``env -> observation -> agent -> Turn (pending) -> Settlement -> advantages -> gate -> Experience ->
step``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class TurnId:
    """Names one decision of one agent; the key under which a turn is settled, logged and trained at most once.

    >>> str(TurnId(episode=3, agent="a07", tick=12))
    '3/a07/12'
    """

    episode: int
    """Number of the episode in its run, from 0."""
    agent: str
    """Id of the agent within the episode; tells nothing about its team."""
    tick: int
    """Tick of the environment at which the agent decided, from 0."""

    def __str__(self) -> str:
        return f"{self.episode}/{self.agent}/{self.tick}"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class PolicyVersion:
    """Which weights: the run's incarnation and the optimiser step. Never reused, not even after a crash.

    >>> str(PolicyVersion(incarnation=2, step=150))
    'v2.150'
    """

    incarnation: int
    """How often the run has been started or resumed, from 1; a resumed run never repeats an older number."""
    step: int
    """Optimiser steps behind these weights."""

    def __str__(self) -> str:
        return f"v{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """The version that ``str`` wrote.

        >>> PolicyVersion.parse("v2.150").step
        150

        Raises:
            ValueError: It is none.
        """
        found = re.fullmatch(r"v(\d{1,18})\.(\d{1,18})", text)
        if found is None:
            raise ValueError(f"{text!r} is no policy version; one looks like v2.150")
        return cls(incarnation=int(found[1]), step=int(found[2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """The distribution a reply was drawn from. Behaviour log-probs are of exactly this distribution.

    >>> SamplingSettings(max_new_tokens=48).temperature
    1.0
    """

    temperature: float = 1.0
    """Logits are divided by this; 0 means greedy (log-probs are then those of temperature 1)."""
    top_p: float = 1.0
    """Nucleus mass; below 1 the support is narrowed and the log-probs are renormalised over it."""
    max_new_tokens: int = 64
    """Longest reply in tokens, the end-of-turn token included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueSettings:
    """How a sampler keeps keys and values: in full, or coded (TurboQuant; 2, 3, 3.5 or 4 bits a number).

    >>> KeyValueSettings(key_bits=4, value_bits=3).coded
    True
    """

    key_bits: float | None = None
    """Of keys, which matter more; none keeps them in full."""
    value_bits: float | None = None
    """Of values; set both, or none."""
    window: int = 32
    """The newest positions of each row, which stay in full; older ones are coded once, as they leave it."""

    @property
    def coded(self) -> bool:
        return self.key_bits is not None


class ParseFailureKind(StrEnum):
    """Why a reply is no action. A failure is data: it is counted, penalised and never paid."""

    NO_JSON = "no_json"
    INVALID_JSON = "invalid_json"
    TRAILING_TEXT = "trailing_text"
    SCHEMA = "schema"
    TRUNCATED = "truncated"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParseFailure:
    """A reply that could not be read as one action.

    >>> ParseFailure(kind=ParseFailureKind.NO_JSON, detail="no '{' in the reply").kind.value
    'no_json'
    """

    kind: ParseFailureKind
    detail: str
    """What was wrong, for people; at most 200 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One place in an episode: who sits there is the loop's business, the environment knows only id and team.

    >>> Seat(agent="a00", team="blue").team
    'blue'
    """

    agent: str
    team: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptParts:
    """What an environment shows an agent, as text, in the order that lets prompts share what is common.

    >>> PromptParts(shared="Tick 3", private="Cash 10").private
    'Cash 10'
    """

    shared: str
    """The same for all agents of this tick."""
    private: str
    """For this agent alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as the model reads it, tokenised exactly once.

    >>> Prompt(token_ids=(1, 5, 6), dropped_messages=0).token_ids
    (1, 5, 6)
    """

    token_ids: tuple[int, ...]
    """Shape (P,). Ends with the template's generation header."""
    dropped_messages: int = 0
    """How many of the oldest messages were left out to fit the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the sampler returns for one prompt.

    >>> start = PolicyVersion(incarnation=1, step=0)
    >>> Reply(token_ids=(7, 2), log_probs=(-0.1, -0.2), truncated=False, version=start).truncated
    False
    """

    token_ids: tuple[int, ...]
    """Shape (R,). Includes the end-of-turn token if one was sampled; never padding."""
    log_probs: tuple[float, ...]
    """Shape (R,), nats, under the distribution of the sampling settings."""
    truncated: bool
    """True when max_new_tokens ran out before an end-of-turn token."""
    version: PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One decision, as it was sampled. Pending until what it set going has settled.

    >>> turn = Turn(id=TurnId(episode=0, agent="a00", tick=1), team="blue", policy="shared",
    ...     version=PolicyVersion(incarnation=1, step=0), sampling=SamplingSettings(), prompt_ids=(1, 2),
    ...     reply_ids=(3, 4), log_probs=(-0.5, -0.1), action=ParseFailure(kind=ParseFailureKind.NO_JSON, detail=""))
    >>> turn.surprisal
    0.6
    """

    id: TurnId
    team: str
    policy: str
    """Name of the policy that replied."""
    version: PolicyVersion
    sampling: SamplingSettings
    prompt_ids: tuple[int, ...]
    """Shape (P,)."""
    reply_ids: tuple[int, ...]
    """Shape (R,): what was sampled is what is trained."""
    log_probs: tuple[float, ...]
    """Shape (R,), nats, of the distribution sampled from."""
    action: object
    """The environment's action record, or a ParseFailure."""

    @property
    def surprisal(self) -> float:
        """-sum of log-probs over the reply, in nats."""
        return -sum(self.log_probs)

    @property
    def valid(self) -> bool:
        """True when the reply was read as an action (the environment may still refuse it)."""
        return not isinstance(self.action, ParseFailure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """An environment's word that a turn has settled: what followed from it, as recorded facts. Comes once a turn.

    >>> Outcome(turn=TurnId(episode=0, agent="a00", tick=1), facts=None, settled_at=4).settled_at
    4
    """

    turn: TurnId
    facts: object
    """The environment's own fact record; rewards are computed from it and from nothing else."""
    settled_at: int
    """Tick at which it settled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward with the parts it was made of. ``total`` None means unscored (a judge failed): not trained, never 0.

    >>> Reward(total=0.5, parts={"trade": 0.5}).total
    0.5
    """

    total: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Weighted parts; they sum to the total."""
    violation: bool = False
    """A safety violation (a secret leaked): the gate always keeps it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """A turn joined, once, with its outcome and its reward. Only settlements train."""

    turn: Turn
    outcome: Outcome
    reward: Reward


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one tick of an environment brought.

    >>> StepOutcome(outcomes=(), terminated=frozenset(), truncated=frozenset(), done=False).done
    False
    """

    outcomes: tuple[Outcome, ...]
    """Turns that settled in this tick, each exactly once in its episode."""
    terminated: frozenset[str] = frozenset()
    """Agents whose episode ended by the world's own rules."""
    truncated: frozenset[str] = frozenset()
    """Agents whose episode was cut by a limit."""
    done: bool = False
    """No agent will act again and every turn has settled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One agent's settled turns in one episode, in order of ticks."""

    episode: int
    agent: str
    team: str
    turns: tuple[Settlement, ...]
    terminated: bool
    """Ended by the world's own rules: nothing comes after."""
    truncated: bool
    """Cut by a limit: a value could still be bootstrapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """All agents' trajectories of one episode."""

    number: int
    seed: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """One turn as the learner takes it. All token arrays have shape (T,) and are aligned with ``token_ids``.

    >>> e = Experience(source=TurnId(episode=0, agent="a00", tick=0), policy="shared", team="blue",
    ...     version=PolicyVersion(incarnation=1, step=0), sampling=SamplingSettings(), token_ids=(1, 2, 3),
    ...     loss_mask=(False, True, True), behaviour_log_probs=(0.0, -0.5, -0.1), advantages=(0.0, 1.0, 1.0),
    ...     weights=(0.0, 1.0, 0.0))
    >>> e.graded_tokens
    1
    """

    source: TurnId
    policy: str
    team: str
    version: PolicyVersion
    sampling: SamplingSettings
    token_ids: tuple[int, ...]
    """Prompt then reply."""
    loss_mask: tuple[bool, ...]
    """True on reply tokens: these count in the denominator whether the gate keeps them or not."""
    behaviour_log_probs: tuple[float, ...]
    """Nats; 0 on the prompt."""
    advantages: tuple[float, ...]
    """Reward units over a baseline; 0 on the prompt."""
    weights: tuple[float, ...]
    """Gate weights in [0, 1]; a weight of 0 costs nothing: it is neither forwarded for itself nor graded."""

    @property
    def graded_tokens(self) -> int:
        return sum(1 for weight, on in zip(self.weights, self.loss_mask, strict=True) if on and weight != 0.0)


class SkipReason(StrEnum):
    """Why a learner step left the weights alone."""

    NO_EXPERIENCE = "no_experience"
    EQUAL_REWARDS = "equal_rewards"
    NOTHING_KEPT = "nothing_kept"
    ZERO_GRADIENT = "zero_gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one learner step did, for one policy. Counts are exact; means are over the step's own tokens or replies."""

    policy: str
    version: PolicyVersion
    """After the step."""
    skipped: SkipReason | None
    loss: float
    grad_norm: float
    """Before clipping."""
    eligible_replies: int
    kept_replies: int
    eligible_tokens: int
    """Reply tokens that count in the denominator."""
    graded_tokens: int
    """Reply tokens with a weight above 0."""
    forwarded_tokens: int
    """Token positions the learner ran forward, padding excluded."""
    mean_ratio: float
    """Mean importance ratio over graded tokens, before truncation."""
    max_ratio: float
    mean_version_lag: float
    """Learner step minus behaviour step, mean over eligible replies."""
    entropy: float
    """Mean surprisal of the eligible tokens under the behaviour policy: an estimate of its entropy, nats a token."""
    kl_to_reference: float | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamReport:
    """One team in one tick."""

    team: str
    replies: int
    valid_replies: int
    """Replies that were read as an action."""
    settled: int
    reward_mean: float | None
    """None when nothing settled."""
    reward_parts: Mapping[str, float]
    """Mean of each weighted part over the settled turns."""
    kept_replies: int
    action_counts: Mapping[str, int]
    reply_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TickReport:
    """What one tick of a loop did: with EpisodeReport the only input of ``metrics``."""

    tick: int
    """Tick of the loop, from 1."""
    teams: tuple[TeamReport, ...]
    steps: tuple[StepReport, ...]
    sampled_tokens: int
    prompt_tokens: int
    sampling_seconds: float
    seconds: float
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeReport:
    """What an environment reports when an episode ends: one figure a name, units in the name."""

    episode: int
    ticks: int
    figures: Mapping[str, float]


# Small policies


class ActionKind(StrEnum):
    """What an action of a small policy is made of."""

    DISCRETE = "discrete"
    """One choice, or several side by side (multi-discrete)."""
    CONTINUOUS = "continuous"
    """Real numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationPart:
    """A named slice of a flat observation: where a dict observation's entry went.

    >>> ObservationPart(name="position", start=2, size=3).size
    3
    """

    name: str
    start: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spaces:
    """What an agent sees and does, as flat arrays. Agents of equal spaces can share a policy, or a stack.

    >>> Spaces(observation_size=4, action=ActionKind.DISCRETE, choices=(2,)).action_size
    1
    """

    observation_size: int
    """D: numbers in one observation; whole numbers of the environment are one-hot in it."""
    action: ActionKind
    choices: tuple[int, ...] = ()
    """Discrete: how many choices each part of the action has; one part is an ordinary discrete action."""
    low: tuple[float, ...] = ()
    """Continuous: least value of each part, -inf where there is none."""
    high: tuple[float, ...] = ()
    parts: tuple[ObservationPart, ...] = ()
    """Entries of a dict observation, in order; empty where the environment's observation is one array."""

    @property
    def action_size(self) -> int:
        """K: parts of one action."""
        return len(self.choices) if self.action is ActionKind.DISCRETE else len(self.low)

    @property
    def mask_size(self) -> int:
        """Entries of an action mask: one a choice, all parts one after the other; 0 for continuous actions."""
        return sum(self.choices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """One step of one agent in one environment, as an actor streams it.

    >>> Transition(agent="a", environment=0, episode=0, version=PolicyVersion(incarnation=1, step=0), observation=[0.0],
    ...     action=[1], log_prob=-0.7, reward=1.0, terminated=True).truncated
    False
    """

    agent: str
    environment: int
    episode: int
    version: PolicyVersion
    """Of the policy that acted, stamped by the actor."""
    observation: Array
    """Shape (D,): what was seen before the action."""
    action: Array
    """Shape (K,)."""
    log_prob: float
    """Nats, under the distribution that was sampled from, mask included."""
    reward: float
    """Received for this step: everything until the agent's next observation."""
    terminated: bool = False
    """The episode ended for the agent by the environment's own rules: nothing comes after."""
    truncated: bool = False
    """It was cut by a limit: the final observation has a value."""
    mask: Array | None = None
    """Shape (M,), bool: which choices were allowed at this step. None where the environment has no masks."""
    state: Array | None = None
    """Shape (S,): what a centralised critic sees at this step."""
    final_observation: Array | None = None
    """Shape (D,): the successor of a truncated step."""
    final_state: Array | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Consecutive steps of one agent in one environment under one version; episodes may end inside it.

    The successor of step t is the observation of step t + 1, unless step t is a *boundary*: terminated (no successor),
    or truncated or the last (its successor is the next row of ``final_observations``).

    >>> import numpy as np
    >>> rollout = Rollout(agent="a", environment=0, episode=3, version=PolicyVersion(incarnation=1, step=7),
    ...     observations=np.zeros((3, 2), np.float32), actions=np.zeros((3, 1), np.int64),
    ...     log_probs=np.zeros(3, np.float32), rewards=np.ones(3, np.float32),
    ...     terminated=np.array([True, False, False]), truncated=np.array([False, True, False]),
    ...     final_observations=np.zeros((2, 2), np.float32))
    >>> len(rollout), rollout.bootstraps.tolist()
    (3, [False, True, True])
    """

    agent: str
    environment: int
    """Which of the environments that the agent is in; paths of different environments are never joined."""
    episode: int
    """Number of the agent's episode in that environment at the first step; each end adds 1."""
    version: PolicyVersion
    """Of the policy that acted, stamped by the actor."""
    observations: Array
    """Shape (T, D), float, as the environment gave them: not normalised."""
    actions: Array
    """Shape (T, K): whole numbers for choices; floats as sampled, before any squashing or clipping."""
    log_probs: Array
    """Shape (T,), nats, under the distribution that was sampled from, mask included."""
    rewards: Array
    """Shape (T,)."""
    terminated: Array
    """Shape (T,), bool."""
    truncated: Array
    """Shape (T,), bool; where both are true, terminated counts."""
    final_observations: Array
    """Shape (B, D): successors of the steps in ``bootstraps``, in order."""
    masks: Array | None = None
    """Shape (T, M), bool."""
    states: Array | None = None
    """Shape (T, S), float."""
    final_states: Array | None = None
    """Shape (B, S)."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def bootstraps(self) -> Array:
        """Shape (T,), bool: steps whose value goes on with that of a final observation."""
        needs = self.truncated & ~self.terminated
        if len(needs):
            needs[-1] = not self.terminated[-1]
        return needs


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """What one update did to one small policy: the learner's half of the per-policy table. Figures are means over the
    steps of the last pass."""

    policy: str
    version: PolicyVersion
    """After the update."""
    failed: bool
    """Numbers were no longer finite: the policy is what it was before."""
    steps: int
    """Steps it learned from."""
    policy_loss: float
    value_loss: float
    """Mean squared error, in units of the value head."""
    entropy: float
    """Nats an action."""
    kl: float
    """Divergence from the policy at the start of the batch (k3 estimator), nats an action."""
    clip_fraction: float
    """Share of steps whose ratio was beyond the clip."""
    grad_norm: float
    """Before clipping."""
    policy_loss_change: float
    """Last pass minus first."""
    value_loss_change: float
    explained_variance: float | None
    """Share of the variance of returns that the values before the update explained; None where that is not known."""
    passes: int
    """Passes over the batch that were begun."""
    stopped: bool
    """Stopped by its divergence, before the step that would have gone on."""
    mismatch: float
    """Mean |log-prob by learner - by actor| of the learner's own version's steps: a measure of unequal arithmetic."""
    version_lag: float
    """Updates between the weights that acted and those that learned, mean over steps."""
    seconds: float
    """Of the whole stack's update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A figure of several episodes.

    >>> Spread.of([1.0, 3.0]).mean
    2.0
    """

    mean: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean=sum(values) / len(values), least=min(values), greatest=max(values), count=len(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationReport:
    """One round of collecting and learning: the only input of the table and ``metrics.jsonl`` of small policies."""

    iteration: int
    """From 1."""
    env_steps: int
    """Ticks of all copies since the run began."""
    returns: Mapping[str, Spread]
    """By policy: sums of rewards of the episodes that its agents ended in this round."""
    lengths: Mapping[str, Spread]
    """By policy: steps that an agent took in them."""
    recent: Mapping[str, float]
    """By policy: mean return of its last 100 episodes."""
    updates: tuple[UpdateReport, ...]
    dropped: int
    """Rollouts that were not trained, in the whole run: stale, invalid, or of a full buffer."""
    collect_seconds: float
    seconds: float
