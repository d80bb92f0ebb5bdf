"""JSON and msgpack from outside, as our records, and back. The only module that knows other people's names (camelCase).

Three shapes come in: our own trajectories, those of the Feed API (spec/market.md 1.7), and OpenEnv's ``TrainingTrace``.
All become a ``LoggedTrajectory``, which is what the log holds. Each field is checked; what does not fit is a
``WireError`` that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sparring.errors import SparringError
from sparring.types import PolicyVersion, SamplingSettings

KEY_LENGTH = 200
MOST_TOKENS = 1 << 20
"""Of one call, prompt or reply."""
LARGEST_TOKEN = 1 << 24


class WireError(SparringError):
    """A message does not hold what it should; the text names the field."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of a language model: token-exact, or text that a trainer must tokenise and score itself."""

    prompt_ids: tuple[int, ...] = ()
    reply_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Nats, of the distribution that was sampled from; one for each reply id."""
    version: str | None = None
    """Of the weights, as in v2.150; None where the producer does not know."""
    messages: tuple[Message, ...] = ()
    """In place of ids."""
    reply: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 0
    """0: not known."""
    purpose: str = "action"
    """Calls of another purpose are kept, and not trained."""
    reward: float | None = None
    """Of this call, where it is not the trajectory's."""

    @property
    def exact(self) -> bool:
        """Holds ids and log-probs."""
        return bool(self.reply_ids)

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens or max(1, len(self.reply_ids)),
        )


class LoggedTrajectory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One agent's calls in order; what an item of kind ``turns`` holds."""

    agent: str
    calls: tuple[Call, ...]
    team: str = ""
    """Empty: none; all without a team share one baseline."""
    policy: str = "shared"
    reward: float | None = None
    """Of all its calls."""
    terminated: bool = False
    truncated: bool = False


class PostedTrajectory(LoggedTrajectory, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """As our own route takes it."""

    key: str
    """Idempotency key, unique for ever."""
    session: str | None = None


def encode_body(trajectory: LoggedTrajectory) -> bytes:
    """What the log holds: the same bytes for the same content, so that a retry is recognised."""
    plain = LoggedTrajectory(**{name: getattr(trajectory, name) for name in LoggedTrajectory.__struct_fields__})
    return _ENCODER.encode(plain)


def decode_body(body: bytes) -> LoggedTrajectory:
    """
    Raises:
        WireError: It is none.
    """
    try:
        return _BODY.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"a logged trajectory cannot be read: {error}") from error


def read_posted(data: bytes, *, binary: bool) -> list[PostedTrajectory | WireError]:
    """The trajectories of a request, ``{"trajectories": [...]}`` in JSON or msgpack; an error in the place of one that is
    not right.

    Raises:
        WireError: The whole is not such an object.
    """
    document = read_document(data, binary=binary)
    rows = document.get("trajectories") if isinstance(document, dict) else None
    if not isinstance(rows, list) or set(document) != {"trajectories"}:
        raise WireError('expected an object {"trajectories": [...]} and nothing else')
    return [_converted(row, PostedTrajectory, f"trajectories[{index}]") for index, row in enumerate(rows)]


def read_document(data: bytes, *, binary: bool) -> Any:
    """Any JSON or msgpack document.

    Raises:
        WireError: It is none.
    """
    try:
        return msgspec.msgpack.decode(data) if binary else msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"the body is no {'msgpack' if binary else 'JSON'}: {error}") from error


def _converted(row: Any, kind: type[PostedTrajectory], where: str) -> PostedTrajectory | WireError:
    try:
        made = msgspec.convert(row, kind)
        check_key(made.key)
        check_trajectory(made)
    except (msgspec.ValidationError, RecursionError) as error:
        return WireError(f"{where}: {error}")
    except WireError as error:
        return WireError(f"{where}.{error}")
    return made


def check_key(key: str) -> None:
    """
    Raises:
        WireError: Empty, too long, or with control characters.
    """
    if not 0 < len(key) <= KEY_LENGTH or not key.isprintable():
        raise WireError(f"key: give 1 to {KEY_LENGTH} printable characters")


def check_trajectory(trajectory: LoggedTrajectory) -> None:
    """
    Raises:
        WireError: A field is out of its range, or fields do not fit together.
    """
    if not 0 < len(trajectory.agent) <= KEY_LENGTH or not trajectory.agent.isprintable():
        raise WireError(f"agent: give 1 to {KEY_LENGTH} printable characters")
    if not trajectory.calls:
        raise WireError("calls: give at least one")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise WireError("reward: give a finite number, or null")
    for index, call in enumerate(trajectory.calls):
        try:
            check_call(call)
        except WireError as error:
            raise WireError(f"calls[{index}].{error}") from error


def check_call(call: Call) -> None:
    """
    Raises:
        WireError: As ``check_trajectory``.
    """
    if call.exact:
        if call.messages or call.reply is not None:
            raise WireError("messages: a call with ids holds no text")
        if not call.prompt_ids:
            raise WireError("prompt_ids: give at least one id")
        if len(call.log_probs) != len(call.reply_ids):
            raise WireError(f"log_probs: {len(call.log_probs)} for {len(call.reply_ids)} reply_ids")
        for name, ids in (("prompt_ids", call.prompt_ids), ("reply_ids", call.reply_ids)):
            if len(ids) > MOST_TOKENS or not 0 <= min(ids) <= max(ids) < LARGEST_TOKEN:
                raise WireError(f"{name}: give at most {MOST_TOKENS} ids from 0 to {LARGEST_TOKEN - 1}")
        if not all(math.isfinite(value) and value <= 1e-3 for value in call.log_probs):
            raise WireError("log_probs: give finite numbers of at most 0")
    elif not call.messages or call.reply is None or call.log_probs or call.prompt_ids:
        raise WireError("reply_ids: give prompt_ids, reply_ids and log_probs, or messages and reply")
    if call.version is not None:
        try:
            PolicyVersion.parse(call.version)
        except ValueError as error:
            raise WireError(f"version: {error}") from error
    if not 0.0 <= call.temperature <= 100.0:
        raise WireError("temperature: give a number from 0 to 100")
    if not 0.0 < call.top_p <= 1.0:
        raise WireError("top_p: give a number above 0 and at most 1")
    if not 0 <= call.max_new_tokens <= MOST_TOKENS:
        raise WireError(f"max_new_tokens: give a number from 0 to {MOST_TOKENS}")
    if call.reward is not None and not math.isfinite(call.reward):
        raise WireError("reward: give a finite number, or null")


# ------------------------------------------------------------------------------------------------------------ Feed API


def from_feed(row: Any, identities: Mapping[str, str]) -> PostedTrajectory:
    """A trajectory of the Feed API. Its calls are text; those of all purposes are kept.

    Args:
        identities: Team by agent id; the trajectory's own word is taken only where the map is silent.

    Raises:
        WireError: A field is missing or of another type.
    """
    try:
        fed = msgspec.convert(row, _FeedTrajectory)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WireError(f"trajectory: {error}") from error
    calls = []
    for step in fed.steps:
        for call in step.llmCalls:
            history = call.messages or (
                Message("system", call.systemPrompt), Message("user", call.userPrompt)
            )  # fmt: skip
            calls.append(Call(
                messages=tuple(history), reply=call.response, temperature=min(100.0, max(0.0, call.temperature)),
                top_p=call.topP if call.topP is not None and 0.0 < call.topP <= 1.0 else 1.0,
                max_new_tokens=max(0, min(call.maxTokens, MOST_TOKENS)), purpose=call.purpose, version=None,
            ))  # fmt: skip
    made = PostedTrajectory(
        key=f"feed/{fed.trajectoryId or fed.id}", agent=fed.agentId, team=identities.get(fed.agentId, fed.team),
        reward=fed.totalReward, terminated=bool(fed.steps and fed.steps[-1].done), calls=tuple(calls),
    )  # fmt: skip
    check_key(made.key)
    check_trajectory(made)
    return made


def to_feed(key: str, number: int, trajectory: LoggedTrajectory, reward: float | None, received: str) -> dict[str, Any]:
    """One of ours as the Feed API shows it; calls without text have none to show."""
    total = trajectory.reward if trajectory.reward is not None else reward
    calls = [
        {
            "callId": f"{key}/{index}", "purpose": call.purpose, "response": call.reply or "",
            "messages": [{"role": m.role, "content": m.content} for m in call.messages], "temperature": call.temperature,
            "maxTokens": call.max_new_tokens, "topP": call.top_p, "modelVersion": call.version,
        }
        for index, call in enumerate(trajectory.calls)
    ]  # fmt: skip
    steps = [
        {"stepId": f"{key}/{i}", "stepNumber": i, "llmCalls": [call], "reward": trajectory.calls[i].reward or 0.0,
         "done": trajectory.terminated and i == len(calls) - 1}
        for i, call in enumerate(calls)
    ]  # fmt: skip
    return {
        "id": str(number), "trajectoryId": key, "agentId": trajectory.agent, "team": trajectory.team or "gray",
        "totalReward": total if total is not None else 0.0, "episodeLength": len(steps), "steps": steps,
        "createdAt": received,
    }  # fmt: skip


class _FeedCall(msgspec.Struct, frozen=True, kw_only=True):
    response: str
    systemPrompt: str = ""
    userPrompt: str = ""
    messages: list[Message] | None = None
    temperature: float = 1.0
    topP: float | None = None
    maxTokens: int = 0
    purpose: str = "action"


class _FeedStep(msgspec.Struct, frozen=True, kw_only=True):
    llmCalls: list[_FeedCall] = []
    done: bool = False


class _FeedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    agentId: str
    steps: list[_FeedStep]
    id: str = ""
    trajectoryId: str = ""
    team: str = "gray"
    totalReward: float | None = None


class FeedPage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of ``GET /api/crl/trajectories``."""

    trajectories: list[Any]
    cursor: str | None = None
    hasMore: bool = False

    @property
    def more(self) -> bool:
        return self.hasMore


def read_page(data: bytes) -> FeedPage:
    """
    Raises:
        WireError: It is no page.
    """
    try:
        return msgspec.json.decode(data, type=FeedPage)
    except msgspec.MsgspecError as error:
        raise WireError(f"this is no page of the Feed API: {error}") from error


def read_identities(data: bytes) -> dict[str, str]:
    """Team by agent id, of ``GET /api/crl/identity-map``.

    Raises:
        WireError: It is no such map.
    """
    try:
        found = msgspec.json.decode(data, type=_IdentityMap)
    except msgspec.MsgspecError as error:
        raise WireError(f"this is no identity map: {error}") from error
    return {agent: identity.team for agent, identity in found.identityMap.items()}


class _Identity(msgspec.Struct, frozen=True, kw_only=True):
    team: str


class _IdentityMap(msgspec.Struct, frozen=True, kw_only=True):
    identityMap: dict[str, _Identity]


# ------------------------------------------------------------------------------------------------------------- OpenEnv


class _TraceTurn(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    per_token_logps: tuple[float, ...]
    loss_mask: tuple[int, ...] | None = None


class _Trace(msgspec.Struct, frozen=True, kw_only=True):
    turns: list[_TraceTurn]
    schema_version: int = 1
    reward: float | None = None


def from_training_trace(row: Any, *, agent: str, policy: str = "shared") -> list[PostedTrajectory]:
    """An OpenEnv ``TrainingTrace`` (schema 1): a turn each, under its ``node_id``. A turn whose mask is all 0 is context; one
    whose completion is masked in part is refused: what was sampled is trained as a whole.

    Raises:
        WireError: A field is missing, doubled or of another type.
    """
    try:
        trace = msgspec.convert(row, _Trace)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WireError(f"trace: {error}") from error
    if trace.schema_version != 1:
        raise WireError(f"trace.schema_version: {trace.schema_version}; schema 1 is read")
    seen: set[str] = set()
    made = []
    for index, turn in enumerate(trace.turns):
        if turn.node_id in seen:
            raise WireError(f"trace.turns[{index}].node_id: {turn.node_id!r} stands twice")
        seen.add(turn.node_id)
        call = Call(
            prompt_ids=turn.prompt_token_ids, reply_ids=turn.completion_token_ids, log_probs=turn.per_token_logps,
            purpose="action" if _trains(turn, f"trace.turns[{index}]") else "context",
        )  # fmt: skip
        one = PostedTrajectory(key=turn.node_id, agent=agent, policy=policy, calls=(call,), reward=trace.reward)
        try:
            check_key(one.key)
            check_trajectory(one)
        except WireError as error:
            raise WireError(f"trace.turns[{index}].{error}") from error
        made.append(one)
    return made


def _trains(turn: _TraceTurn, where: str) -> bool:
    """Whether a turn's mask trains it. The mask covers prompt and completion, as OpenEnv's own check has it."""
    if turn.loss_mask is None:
        return True
    prompt, mask = len(turn.prompt_token_ids), turn.loss_mask
    if len(mask) != prompt + len(turn.completion_token_ids) or not set(mask) <= {0, 1} or any(mask[:prompt]):
        raise WireError(f"{where}.loss_mask: give a 0 for each prompt token, then a 0 or 1 for each of the completion")
    trained = set(mask[prompt:])
    if len(trained) > 1:
        raise WireError(f"{where}.loss_mask: a completion is trained as a whole or not at all")
    return trained == {1}


def forks(calls: Sequence[tuple[int, ...]]) -> list[int | None]:
    """The call that each continues: the one whose prompt and reply are the longest beginning of its prompt, or None.

    A history that was rewritten, or a sub-agent beside another, begins a branch of its own; nothing is left out.

    Args:
        calls: Of each call, in order, the token ids of prompt and reply; a parent always comes before its child.

    >>> forks([(1, 2), (1, 2, 3, 4), (1, 9), (1, 2, 3, 4, 5)])
    [None, 0, None, 1]
    """
    found: list[int | None] = []
    for index, ids in enumerate(calls):
        best: int | None = None
        for before in range(index):
            earlier = calls[before]
            if (
                len(earlier) < len(ids)
                and ids[: len(earlier)] == earlier
                and (best is None or len(earlier) >= len(calls[best]))
            ):
                best = before
        found.append(best)
    return found


_ENCODER = msgspec.msgpack.Encoder()
_BODY = msgspec.msgpack.Decoder(LoggedTrajectory)
