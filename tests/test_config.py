"""Settings: defaults, files, overrides, keywords, and errors that name the field and the fix."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.config import (
    CheckpointSettings,
    DemoConfig,
    EvalConfig,
    LoraSettings,
    SharedConfig,
    WarmupConfig,
    changed_settings,
    describe,
    from_settings,
    load_config,
    to_toml,
)
from sparring.errors import ConfigError
from sparring.learning.settings import GateSettings
from sparring.types import SamplingSettings

ROOT = Path(__file__).parents[1]


def shared(*overrides: str, toml: Path | None = None) -> SharedConfig:
    return load_config(SharedConfig, toml=toml, overrides=overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        shared(*overrides)
    return str(caught.value)


def test_defaults_are_the_class_itself() -> None:
    assert shared() == SharedConfig()
    config = SharedConfig()
    assert (config.model, config.env, config.ticks, config.worlds, config.agents_per_team) == (
        "tiny",
        "market",
        100,
        4,
        4,
    )
    assert config.sampling == SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=64)
    assert config.checkpoint == CheckpointSettings(every=25, keep=5)
    assert (config.gate.rate, config.gate.warmup_rate, config.gate.warmup_replies) == (0.03, 0.30, 500)


def test_overrides_of_every_kind() -> None:
    config = shared(
        *(
            "--agents-per-team",
            "3",
            "--gate.rate=0.1",
            "--gate.sign-split",
            "false",
            "--optimizer.max_grad_norm",
            "none",
        ),
        *("--trainable", "blue, gray", "--players.red", "bot:attacker", "--env-settings.red-share", "0.2", "--quiet"),
        *("--env-settings.full", "true", "--env-settings.name", "x", "--env-settings.ticks", "8", "--threads", "2"),
    )
    assert (config.agents_per_team, config.gate.rate, config.gate.sign_split) == (3, 0.1, False)
    assert config.optimizer.max_grad_norm is None
    assert config.trainable == ("blue", "gray")
    assert config.players == {"red": "bot:attacker"}
    assert config.env_settings == {"red_share": 0.2, "full": True, "name": "x", "ticks": 8}
    assert (config.threads, config.quiet) == (2, True)


def test_dashes_underscores_no_prefix_repetition_and_last_wins() -> None:
    assert shared("--agents_per_team", "3") == shared("--agents-per-team", "3")
    assert shared("--no-gate.sign-split") == shared("--gate.sign_split", "off") != shared()
    assert shared("--trainable", "blue", "--trainable", "red").trainable == ("blue", "red")
    assert shared("--ticks", "5", "--ticks", "6").ticks == 6
    assert shared("--quiet", "--ticks", "5").quiet
    assert shared("--no-gate.sign-split", "--gate.price", "-0.5").gate.price == -0.5
    assert shared('--env-settings.code="12"').env_settings == {"code": "12"}


def test_the_file_then_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        'ticks = 7\ntrainable = ["red"]\n[gate]\nrate = 0.5\nwarmup_replies = 9\n[players]\ngray = "bot:honest"\n'
    )
    config = shared("--gate.rate", "0.25", "--players.blue", "frozen:x", "--config", str(file))
    assert (config.ticks, config.gate.rate, config.gate.warmup_replies) == (7, 0.25, 9)
    assert config.players == {"gray": "bot:honest", "blue": "frozen:x"}
    assert shared("--trainable", "gray", "--players.gray", "policy", toml=file).trainable == ("gray",)
    with pytest.raises(ConfigError, match="--config is given twice"):
        shared("--config", str(file), toml=file)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--gate.rat", "1"), "unknown setting --gate.rat (did you mean --gate.rate?)"),
        (("--rate", "1"), "unknown setting --rate (did you mean --gate.rate?)"),
        (("--agent-per-team", "1"), "(did you mean --agents-per-team?)"),
        (("--ticks", "many"), "--ticks: expected whole number, got 'many'"),
        (("--ticks", "3.0"), "--ticks: expected whole number, got '3.0'"),
        (("--gate.rate", "nan"), "--gate.rate: expected a finite number, got nan"),
        (("--gate.mode", "kondoo"), "--gate.mode: expected kondo | delight | uniform | off, got 'kondoo'"),
        (("--quiet=perhaps",), "--quiet: expected true | false, got 'perhaps'"),
        (("--no-quiet=true",), "takes no value"),
        (("--gate", "1"), "--gate is a group of settings: write --gate.mode value"),
        (("--players", "x"), "--players is a table: write --players.NAME value"),
        (("--ticks",), "--ticks wants a value"),
        (("--ticks", "--quiet"), "--ticks wants a value"),
        (("blue",), "unexpected argument 'blue'"),
        (("--ticks", "0"), "ticks is 0: give at least 1"),
        (("--gate.rate", "2"), "gate.rate is 2"),
        (("--sampling.temperature", "0"), "sampling.temperature is 0.0"),
        (("--reward", "outcom"), "(did you mean 'outcome'?)"),
        (("--players.red", "bots:x"), "(did you mean 'bot'?)"),
        (("--players.red", "openai:localhost"), "openai:http://HOST:PORT/v1#MODEL"),
        (("--players.red", "bot:x", "--trainable", "red"), "only a policy learns"),
        (("--lora.rank", "8"), "adapters is 'none'"),
        (("--loss.kl-coefficient", "0.1"), "gate.unit = 'reply'"),
        (("--run", "../x"), "run is '../x'"),
        (("--seed", "-1"), "seed is -1"),
        (("--config", "/nowhere.toml"), "cannot read /nowhere.toml: No such file"),
    ],
)
def test_refusals_name_the_field_and_the_fix(overrides: tuple[str, ...], message: str) -> None:
    assert message in refusal(*overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gate]\nrat = 1.0", "unknown setting 'gate.rat' (did you mean 'gate.rate'?)"),
        ("[gate]\nrate = 'high'", "gate.rate: expected number, got 'high'"),
        ("ticks = true", "ticks: expected whole number, got True"),
        ("ticks = '5'", "ticks: expected whole number, got '5'"),
        ("gate = 3", "gate: expected a group of settings, as in 'gate.mode', got 3"),
        ("trainable = 'red'", "trainable: expected list of text, got 'red'"),
        ("[env_settings]\na = [1]", "env_settings: expected table"),
        ("ticks = ", "is not valid TOML"),
        ("a = " + "[" * 10000, "is not valid TOML"),
    ],
)
def test_files_are_read_strictly(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        shared(toml=file)
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        shared(toml=file)


def test_keywords_dotted_nested_and_whole() -> None:
    expected = SharedConfig(gate=GateSettings(rate=0.2))
    assert from_settings(SharedConfig, {"gate.rate": 0.2}) == expected
    assert from_settings(SharedConfig, {"gate": {"rate": 0.2}}) == expected
    assert from_settings(SharedConfig, {"gate": GateSettings(rate=0.2)}) == expected
    base = SharedConfig(gate=GateSettings(rate=0.2, history=7), ticks=3)
    assert from_settings(SharedConfig, {"gate": {"rate": 0.5}}, base) == replace(
        base, gate=replace(base.gate, rate=0.5)
    )
    with pytest.raises(ConfigError, match="ticks: expected whole number, got '3'"):
        from_settings(SharedConfig, {"ticks": "3"})
    with pytest.raises(ConfigError, match="ticks: expected whole number, got '3'"):
        SharedConfig(ticks="3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gate: expected GateSettings"):
        SharedConfig(gate=3)  # type: ignore[arg-type]


def test_a_setting_that_must_be_given() -> None:
    with pytest.raises(ConfigError, match="run is missing: give --run"):
        load_config(EvalConfig)
    assert load_config(EvalConfig, overrides=["--seed", "3", "runs/a"], positional=["run"]).run == "runs/a"
    with pytest.raises(ConfigError, match="unexpected argument 'b'"):
        load_config(EvalConfig, overrides=["a", "b"], positional=["run"])


def test_a_group_keeps_the_defaults_of_its_owner() -> None:
    config = load_config(SharedConfig, overrides=["--adapters", "shared", "--lora.alpha", "4"])
    assert config.lora == LoraSettings(rank=16, alpha=4.0)


def test_toml_reads_back_equal(tmp_path: Path) -> None:
    config = shared(
        *("--adapters", "per_team", "--lora.rank", "4", "--players.the team", "frozen:a b", "--trainable", "blue"),
        *("--env-settings.note", 'a "quoted" \\ text\x7f', "--env-settings.n", "3", "--env-settings.x", "1e-9"),
    )
    text = to_toml(config)
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert shared(toml=file) == config
    assert set(tomllib.loads(text)["gate"]) == {
        each.flag[7:].replace("-", "_") for each in describe(SharedConfig) if each.flag.startswith("--gate.")
    }
    for other in (WarmupConfig(out="x", chats=Path("a/b.jsonl")), EvalConfig(run="r"), DemoConfig()):
        file.write_text(to_toml(other))
        assert load_config(type(other), toml=file) == other


def test_what_changed() -> None:
    assert changed_settings(shared(), shared("--gate.rate", "0.5", "--ticks", "3")) == ("ticks", "gate.rate")


def test_options_stay_few_and_all_are_explained() -> None:
    rows = describe(SharedConfig)
    assert len(rows) <= 70, "every option must earn its place: take one out for each that comes in"
    # A choice between names may speak for itself.
    assert [row.flag for row in rows if not row.doc and " | " not in row.type] == []
    rate = next(row for row in rows if row.flag == "--gate.rate")
    assert (rate.type, rate.default) == ("number", "0.03")
    for cls, most in ((WarmupConfig, 20), (EvalConfig, 10), (DemoConfig, 6)):
        assert len(describe(cls)) <= most
        assert all(row.doc for row in describe(cls))


CLASSES = {"train shared": SharedConfig, "warmup": WarmupConfig, "demo": DemoConfig}
SHIPPED = [
    path for folder in ("recipes", "examples", "benchmarks", "docs") for path in ROOT.glob(f"{folder}/**/*.toml")
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_parses(path: Path) -> None:
    """The first line of a shipped file says which command reads it: ``# sparring train shared --config ...``."""
    first = path.read_text().splitlines()[0]
    match = re.match(r"# sparring (train shared|warmup|demo)\b", first)
    assert match, f"{path}: begin with a comment that names its command"
    load_config(CLASSES[match.group(1)], toml=path)


def test_config_loads_without_torch() -> None:
    code = "import sys, sparring.config; assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Whatever is written, the answer is a configuration or a ConfigError.

FLAGS = [row.flag.replace(".NAME", ".x") for row in describe(SharedConfig)]
TEXT = st.text(max_size=12) | st.sampled_from(["none", "true", "1", "-1", "0.5", "1e999", "inf", "9" * 5000, "a,b", ""])
FLAG = st.sampled_from(FLAGS) | st.text(max_size=12).map("--{}".format) | st.sampled_from(FLAGS).map(lambda f: f[:-1])
TOKENS = st.lists(FLAG | TEXT | st.tuples(FLAG, TEXT).map("=".join), max_size=6)


@settings(max_examples=400, deadline=None)
@given(TOKENS)
def test_any_command_line_is_a_configuration_or_a_config_error(tokens: list[str]) -> None:
    try:
        config = shared(*tokens)
    except ConfigError as error:
        assert str(error)
    else:
        tomllib.loads(to_toml(config))


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)
NAMES = st.sampled_from([flag[2:].replace("-", "_") for flag in FLAGS]) | st.text(max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, TREE, max_size=4))
def test_any_keywords_are_a_configuration_or_a_config_error(keywords: dict[str, object]) -> None:
    try:
        config = from_settings(SharedConfig, keywords)
    except ConfigError as error:
        assert str(error)
    else:
        tomllib.loads(to_toml(config))


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=6),
        st.text(max_size=8)
        | st.integers(-(2**63), 2**63 - 1)
        | st.booleans()
        | st.floats(allow_nan=False, allow_infinity=False),
        max_size=4,
    ),
    st.lists(st.text(max_size=6), max_size=3),
    st.floats(1e-12, 1.0),
)
def test_whatever_is_accepted_reads_back_equal(table: dict[str, object], teams: list[str], rate: float) -> None:
    try:
        config = from_settings(SharedConfig, {"env_settings": table, "trainable": tuple(teams), "gate.rate": rate})
    except ConfigError:
        return
    assert from_settings(SharedConfig, tomllib.loads(to_toml(config))) == config
