"""Rollouts as Parquet, one row a step, without loss: for notebooks, query engines and offline training.

Columns: ``rollout`` (number in the file), the scalars of ``Rollout``, one column an array of it, and
``final_observation`` and ``final_state`` at the steps that bootstrap. Needs pyarrow (``pip install 'sparring[agents]'``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.files import TEMPORARY_PREFIX, FileError
from sparring.types import PolicyVersion, Rollout

_MATRICES = ("observations", "actions", "masks", "states")
_VECTORS = ("log_probs", "rewards", "terminated", "truncated")
_FINALS = ("final_observations", "final_states")


def write_parquet(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts of one kind (equal dtypes and widths) to a new file, whole or not at all.

    Raises:
        FileError: There is nothing to write, or rollouts differ in dtype or width.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not rollouts:
        raise FileError(f"{path}: no rollouts to write")
    lengths = [len(rollout) for rollout in rollouts]
    columns: dict[str, Any] = {
        "rollout": pa.array(np.repeat(np.arange(len(rollouts)), lengths)),
        "agent": pa.array([name for r in rollouts for name in [r.agent] * len(r)]),
        "environment": pa.array(np.repeat([r.environment for r in rollouts], lengths)),
        "episode": pa.array(np.repeat([r.episode for r in rollouts], lengths)),
        "incarnation": pa.array(np.repeat([r.version.incarnation for r in rollouts], lengths)),
        "version_step": pa.array(np.repeat([r.version.step for r in rollouts], lengths)),
    }
    for name in _VECTORS:
        columns[name] = pa.array(_joined(path, name, rollouts))
    for name in _MATRICES:
        if getattr(rollouts[0], name) is not None or any(getattr(r, name) is not None for r in rollouts):
            matrix = _joined(path, name, rollouts)
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(matrix.ravel()), matrix.shape[1])
    needs = np.concatenate([rollout.bootstraps for rollout in rollouts])
    for name in _FINALS:
        if getattr(rollouts[0], name) is not None:
            finals = _joined(path, name, rollouts)
            # Variable lists: a fixed-size one would hold numbers at rows that have none.
            offsets = np.concatenate([[0], np.cumsum(np.where(needs, finals.shape[1], 0))]).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(finals.ravel()))
    table = pa.table(columns)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_parquet(path: Path) -> list[Rollout]:
    """The rollouts of a file, as they were written.

    Raises:
        FileError: It is no Parquet file of rollouts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        found = {name: _arrays(table.column(name)) for name in table.column_names}
        cuts = np.flatnonzero(np.diff(found["rollout"])) + 1
        edges = [0, *cuts.tolist(), len(found["rollout"])]
        return [_rollout(found, start, stop) for start, stop in itertools.pairwise(edges)]
    except (pa.ArrowException, KeyError, OSError) as error:
        raise FileError(f"{path} is no Parquet file of rollouts: {error}") from error


def _joined(path: Path, name: str, rollouts: Sequence[Rollout]) -> NDArray[Any]:
    arrays = [getattr(rollout, name) for rollout in rollouts]
    if any(array is None for array in arrays) or len({(a.dtype, a.shape[1:]) for a in arrays}) != 1:
        raise FileError(f"{path}: rollouts differ in dtype or width of {name}: write one file for each kind")
    return np.concatenate(arrays)


def _arrays(column: Any) -> NDArray[Any]:
    import pyarrow as pa

    array = column.combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        return np.asarray(array.flatten()).reshape(len(array), array.type.list_size)
    if pa.types.is_list(array.type):  # rows of equal width, or empty
        flat, widths = np.asarray(array.flatten()), np.diff(np.asarray(array.offsets))
        out = np.empty(len(array), dtype=object)
        starts = np.cumsum(widths) - widths
        for row, (start, width) in enumerate(zip(starts.tolist(), widths.tolist(), strict=True)):
            out[row] = flat[start : start + width]
        return out
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _rollout(found: dict[str, NDArray[Any]], start: int, stop: int) -> Rollout:
    here = {name: array[start:stop] for name, array in found.items()}

    def copy(name: str) -> Any:
        return np.array(here[name]) if name in here else None

    def finals(name: str, width: int) -> Any:
        rows = [row for row in here[name] if len(row)] if name in here else None
        if rows is None:
            return None
        return np.stack(rows) if rows else np.zeros((0, width), here[name][0].dtype)

    observations, states = copy("observations"), copy("states")
    return Rollout(
        agent=str(here["agent"][0]), environment=int(here["environment"][0]), episode=int(here["episode"][0]),
        version=PolicyVersion(incarnation=int(here["incarnation"][0]), step=int(here["version_step"][0])),
        observations=observations, actions=copy("actions"), states=states, masks=copy("masks"),
        final_observations=finals("final_observations", observations.shape[1]),
        final_states=None if states is None else finals("final_states", states.shape[1]),
        **{name: copy(name) for name in _VECTORS},
    )  # fmt: skip
