"""What learns, as files of a checkpoint and back: moments, the references of a KL term, the gate's history.

The loops add their policies' weights and their own state; both read and write these files the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparring.errors import CheckpointError
from sparring.learning.gate import Gate, GateState
from sparring.learning.optimizers import NamedOptimizer, OptimizerState, load_optimizer_state, optimizer_state
from sparring.policies.contract import ReferencePolicy


def learner_tensors(
    policies: Mapping[str, ReferencePolicy], optimizers: Mapping[str, NamedOptimizer], gate: Gate
) -> dict[str, Mapping[str, Tensor]]:
    """Tensors by name, by file: ``optimizer-NAME``, ``reference-NAME`` where the policy keeps one, ``gate``."""
    files: dict[str, Mapping[str, Tensor]] = {}
    for name, optimizer in optimizers.items():
        files[_moments(name)] = optimizer_state(optimizer)[0]
        reference = policies[name].reference_state()
        if reference is not None:
            files[_reference(name)] = reference
    files["gate.safetensors"] = {name: torch.from_numpy(array) for name, array in gate.state()[0].items()}
    return files


def restore_learners(
    files: Mapping[str, Mapping[str, Tensor]], records: Mapping[str, OptimizerState], history: GateState,
    policies: Mapping[str, ReferencePolicy], optimizers: Mapping[str, NamedOptimizer], gate: Gate, *, where: str,
) -> None:  # fmt: skip
    """Take up what :func:`learner_tensors` wrote, with the records that lay beside it.

    Raises:
        CheckpointError: A file is missing (other policies learn now, or a KL term came or went) or does not fit;
            ``where`` names the checkpoint.
    """
    referenced = [name for name in optimizers if policies[name].reference_state() is not None]
    for file in [*map(_moments, optimizers), *map(_reference, referenced)]:
        if file not in files:
            raise CheckpointError(
                f"{where}: no {file} in it; which policies learn and whether loss.kl_coefficient is above 0 cannot change "
                "in a resume"
            )
    for name, optimizer in optimizers.items():
        load_optimizer_state(optimizer, files[_moments(name)], records[name])
    for name in referenced:
        policies[name].load_reference(files[_reference(name)])
    gate.load_state({name: tensor.numpy() for name, tensor in files.get("gate.safetensors", {}).items()}, history)


def _moments(policy: str) -> str:
    return f"optimizer-{policy}.safetensors"


def _reference(policy: str) -> str:
    return f"reference-{policy}.safetensors"
