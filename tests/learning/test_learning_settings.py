"""Every contradiction is an error that names the field and the fix; no torch is loaded for it."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from sparring.errors import ConfigError
from sparring.learning.settings import (
    AdvantageSettings,
    GateSettings,
    LearningSettings,
    LossSettings,
    OptimizerSettings,
)


@pytest.mark.parametrize(
    ("kind", "values", "names"),
    [
        (AdvantageSettings, {"kind": "gae"}, ("advantages.kind", "leave_one_out")),
        (AdvantageSettings, {"decay": 1.0}, ("advantages.decay",)),
        (AdvantageSettings, {"scale_floor": 1e-8}, ("advantages.scale_floor", "0.01")),
        (AdvantageSettings, {"scale": "group"}, ("advantages.scale", "'role'")),
        (GateSettings, {"rate": 0.0}, ("gate.rate", "above 0")),
        (GateSettings, {"rate": 3.0}, ("gate.rate", "at most 1")),
        (GateSettings, {"rate": float("nan")}, ("gate.rate",)),
        (GateSettings, {"warmup_replies": -1}, ("gate.warmup_replies",)),
        (GateSettings, {"mode": "off", "price": 1.0}, ("gate.price", "kondo")),
        (GateSettings, {"price": -1.0}, ("gate.price", "sign_split")),
        (GateSettings, {"mode": "uniform", "bernoulli": True}, ("gate.bernoulli",)),
        (GateSettings, {"temperature": 0.0}, ("gate.temperature",)),
        (LossSettings, {"ratio_cap": 0.5}, ("loss.ratio_cap",)),
        (LossSettings, {"kind": "clipped", "ratio_cap": 1.1}, ("loss.ratio_cap", "1.2")),
        (LossSettings, {"clip_low": 1.0}, ("loss.clip_low",)),
        (LossSettings, {"kl_coefficient": -1.0}, ("loss.kl_coefficient",)),
        (LossSettings, {"max_version_lag": -1}, ("loss.max_version_lag",)),
        (OptimizerSettings, {"kind": "sgd"}, ("optimizer.kind", "apollo")),
        (OptimizerSettings, {"learning_rate": 0.0}, ("optimizer.learning_rate",)),
        (OptimizerSettings, {"beta2": 1.0}, ("optimizer.beta2",)),
        (OptimizerSettings, {"rank": 0}, ("optimizer.rank",)),
        (OptimizerSettings, {"norm_growth_limit": 1.0}, ("optimizer.norm_growth_limit",)),
    ],
)
def test_bad_values_name_field_and_fix(kind: type, values: dict[str, object], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        kind(**values)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize("loss", [LossSettings(kl_coefficient=0.1), LossSettings(ratio="reply")])
def test_terms_of_whole_replies_refuse_a_gate_per_token(loss: LossSettings) -> None:
    with pytest.raises(ConfigError, match=r"gate\.unit = 'reply'"):
        LearningSettings(loss=loss)
    for gate in (GateSettings(unit="reply"), GateSettings(mode="off"), GateSettings(mode="delight")):
        assert LearningSettings(loss=loss, gate=gate).loss == loss


def test_settings_survive_json() -> None:
    settings = LearningSettings(optimizer=OptimizerSettings(kind="apollo", rank=4))
    assert msgspec.json.decode(msgspec.json.encode(settings), type=LearningSettings) == settings


def test_settings_load_no_torch() -> None:
    code = "import sys, sparring.learning.settings; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
