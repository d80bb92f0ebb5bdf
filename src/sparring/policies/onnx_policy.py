"""Small policies as ONNX: normaliser, mask and squashing inside, loaded and compared after writing; and to act with.

A file takes ``observation`` (N, D) and, for choices, ``mask`` (N, M), and gives ``output`` (N, F): log-probs of all
choices, or means; and ``action`` (N, K): the most likely one, as the environment takes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.errors import ModelError
from sparring.policies.acting import OBSERVATION_CLIP, ActorWeights, act, for_environment, outputs
from sparring.types import ActionKind

OPSET = 17
TOLERANCE = 1e-4
"""Largest difference between the written file's outputs and ours, before it is refused."""
_FORBIDDEN = np.float32(-1e9)


def export(path: Path, weights: ActorWeights, row: int, *, seed: int = 0) -> None:
    """Write one policy, load it again, and compare it with ours on random observations and masks.

    Args:
        path: File to write, whole or not at all.
        weights: Of a stack.
        row: Which of its policies.
        seed: Of what it is compared on.

    Raises:
        ModelError: What was written does not say what the policy says; the file is not kept.
    """
    one = weights.rows(np.array([row]))
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(_model(one).SerializeToString())
    try:
        _compare(temporary, one, np.random.default_rng(seed))
    except BaseException:
        temporary.unlink()
        raise
    os.replace(temporary, path)


class _Graph:
    """Nodes one after the other, each taking the one before."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, array: Any) -> str:
        from onnx import numpy_helper

        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        from onnx import helper

        name = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name


def _model(weights: ActorWeights) -> Any:
    from onnx import TensorProto, checker, helper

    graph, spaces = _Graph(), weights.spaces
    x = "observation"
    if weights.mean is not None and weights.scale is not None:
        x = graph.add("Div", graph.add("Sub", x, graph.constant(weights.mean[0])), graph.constant(weights.scale[0]))
        x = graph.add(
            "Clip", x, graph.constant(np.float32(-OBSERVATION_CLIP)), graph.constant(np.float32(OBSERVATION_CLIP))
        )
    for weight, bias in weights.layers:
        x = graph.add("Gemm", x, graph.constant(weight[0]), graph.constant(bias[0, 0]))
        x = graph.add({"tanh": "Tanh", "relu": "Relu"}[weights.activation], x)
    said = graph.add("Gemm", x, graph.constant(weights.head[0][0]), graph.constant(weights.head[1][0, 0]))
    inputs = [helper.make_tensor_value_info("observation", TensorProto.FLOAT, ["N", spaces.observation_size])]
    if spaces.action is ActionKind.DISCRETE:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["N", spaces.mask_size]))
        said = graph.add("Where", "mask", said, graph.constant(_FORBIDDEN))
        log_probs, taken, start = [], [], 0
        for count in spaces.choices:
            edges = [graph.constant(np.array([edge])) for edge in (start, start + count, 1)]
            part = graph.add("Slice", said, *edges)
            log_probs.append(graph.add("LogSoftmax", part, axis=1))
            taken.append(graph.add("ArgMax", part, axis=1, keepdims=1))
            start += count
        graph.add("Concat", *log_probs, axis=1, output="output")
        graph.add("Concat", *taken, axis=1, output="action")
        kind = TensorProto.INT64
    else:
        low, high = np.array(spaces.low, np.float32), np.array(spaces.high, np.float32)
        graph.add("Identity", said, output="output")
        action = said
        if weights.squash:
            widened = graph.add("Mul", graph.add("Tanh", said), graph.constant((high - low) / np.float32(2)))
            action = graph.add("Add", widened, graph.constant((high + low) / np.float32(2)))
        action = graph.add("Max", action, graph.constant(low))
        graph.add("Min", action, graph.constant(high), output="action")
        kind = TensorProto.FLOAT
    made = helper.make_graph(
        graph.nodes, "policy", inputs,
        [
            helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", spaces.mask_size or spaces.action_size]),
            helper.make_tensor_value_info("action", kind, ["N", spaces.action_size]),
        ],
        graph.constants,
    )  # fmt: skip
    model = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8, producer_name="sparring"
    )
    version = weights.versions[0]
    helper.set_model_props(
        model, {"version": str(version), "parts": ",".join(f"{p.name}:{p.start}:{p.size}" for p in spaces.parts)}
    )
    checker.check_model(model, full_check=True)
    return model


def _compare(path: Path, weights: ActorWeights, rng: np.random.Generator) -> None:
    spaces, count = weights.spaces, 64
    scale = 1.0 if weights.scale is None else weights.scale[0]
    middle = 0.0 if weights.mean is None else weights.mean[0]
    seen = (middle + 3.0 * scale * rng.normal(size=(count, spaces.observation_size))).astype(np.float32)
    masks = None
    if spaces.action is ActionKind.DISCRETE:
        masks = rng.random((count, spaces.mask_size)) < 0.6
        starts = np.cumsum(spaces.choices, dtype=np.int64) - np.array(spaces.choices)
        masks[:, starts] |= ~np.add.reduceat(masks, starts, axis=1).astype(bool)
    found = OnnxPolicy(path).run(seen, masks)
    expected = outputs(weights, seen[None])[0]
    actions, _ = act(weights, seen[None], None if masks is None else masks[None], None)
    played = for_environment(weights, actions)[0]
    if masks is not None:
        expected = _log_probs(np.where(masks, expected, _FORBIDDEN), spaces.choices)
        near = masks
    else:
        near = np.ones(expected.shape, np.bool_)
    gap = float(np.abs(np.where(near, found.output - expected, 0.0)).max())
    if not gap <= TOLERANCE:
        raise ModelError(f"{path.name}: the file says something else than the policy (by up to {gap:.2g}); not kept")
    # Of two choices within rounding either may win; everything else must be the same action.
    differ = (np.abs(found.action - played) > TOLERANCE).any(axis=1)
    if masks is not None and differ.any():
        best = np.sort(np.where(masks, expected, -np.inf), axis=1)
        differ &= (best[:, -1] - best[:, -2] > TOLERANCE) if len(spaces.choices) == 1 else differ
    if differ.any():
        raise ModelError(f"{path.name}: the file acts otherwise than the policy; not kept")


def _log_probs(logits: NDArray[Any], choices: tuple[int, ...]) -> NDArray[Any]:
    parts = []
    for part in np.split(logits, np.cumsum(choices)[:-1], axis=1):
        shifted = part - part.max(axis=1, keepdims=True)
        parts.append(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a file says to N observations."""

    output: NDArray[np.float32]
    """Shape (N, F): log-probs of all choices (forbidden ones below -1e8), or means."""
    action: NDArray[Any]
    """Shape (N, K)."""
    version: str
    """Of the policy that said it."""


class OnnxPolicy:
    """A file to act with, without torch. It can be replaced while others act: a call uses one version from its
    beginning to its end."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ModelError: It is no ONNX file of a policy.
        """
        self.path = path
        self._loaded = self._load()

    def _load(self) -> tuple[Any, str, int]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            stamp = self.path.stat().st_mtime_ns
            session = onnxruntime.InferenceSession(self.path.read_bytes(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises classes of its own that share no base
            raise ModelError(f"{self.path} cannot be loaded as ONNX: {error}") from error
        properties: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
        if {each.name for each in session.get_outputs()} != {"output", "action"}:
            raise ModelError(f"{self.path} is ONNX, but no policy of ours: it has no outputs 'output' and 'action'")
        return session, properties.get("version", "?"), stamp

    @property
    def version(self) -> str:
        return self._loaded[1]

    def reload(self) -> bool:
        """Take up the file if it was replaced since; False if it was not.

        Raises:
            ModelError: What is there now cannot be loaded; the version before stays in use.
        """
        if self.path.stat().st_mtime_ns == self._loaded[2]:
            return False
        self._loaded = self._load()  # one assignment: nobody sees half of it
        return True

    def run(self, observations: NDArray[Any], masks: NDArray[np.bool_] | None = None) -> Said:
        """What the policy says.

        Args:
            observations: Shape (N, D), as the environment gives them.
            masks: Shape (N, M); None allows everything.
        """
        session, version, _ = self._loaded
        given: dict[str, Any] = {"observation": np.ascontiguousarray(observations, np.float32)}
        wanted = {each.name: each for each in session.get_inputs()}
        if "mask" in wanted:
            width = wanted["mask"].shape[1]
            given["mask"] = np.ones((len(observations), width), np.bool_) if masks is None else masks
        output, action = session.run(["output", "action"], given)
        return Said(output=output, action=action, version=version)
