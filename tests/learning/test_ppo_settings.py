"""Settings of PPO are checked where they are made; the message names the field."""

from __future__ import annotations

from typing import Any

import pytest

from sparring.errors import ConfigError
from sparring.learning.settings import PPOSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 1.1), ("gae_lambda", -0.1), ("epochs", 0), ("minibatch", 0), ("learning_rate", 0.0), ("clip", -1.0),
        ("clip_value", 0.0), ("target_kl", 0.0), ("learning_rate_end", -1.0), ("entropy_coefficient", -0.1),
        ("max_version_lag", -1), ("max_grad_norm", float("nan")),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"ppo\.{name} is "):
        PPOSettings(**{name: value})
