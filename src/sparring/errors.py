"""Errors people can act on. Each message names the field or file and the fix; the command line prints it as one line
and exits with code 2. Anything else that is raised is a bug of ours and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SparringError(Exception):
    """Base of every error a user can cause and cure."""


class ConfigError(SparringError):
    """A setting is unknown, mistyped or contradicts another."""


class ModelError(SparringError):
    """A model is missing, unreadable, of the wrong shape, or does not fit in memory."""


class CheckpointError(SparringError):
    """A checkpoint is missing, incomplete, tampered with, or belongs to another configuration."""


class PublicationError(SparringError):
    """What a run has published is damaged, missing, or cannot be changed as asked."""


class EnvError(SparringError):
    """An environment breaks the contract, or cannot be found."""


class PromptError(SparringError):
    """A prompt cannot be made to fit the model's context."""


class TrainingError(SparringError):
    """Training met a non-finite number; the batch was saved."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest valid name, or the list of valid names when none is close.

    >>> nearest("rat", ["rate", "mode"])
    " (did you mean 'rate'?)"
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (valid: {', '.join(names)})" if names else ""
