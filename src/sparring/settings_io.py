"""Frozen dataclasses from TOML files, command lines and keywords, and back to TOML: strict, with errors that help.

A *setting* is a field of a configuration class, named by its dotted path (``gate.rate``). A field that is itself a
dataclass is a group; a mapping (``players``) takes any key below it. Nothing is converted silently: text from the
command line is read by the setting's type, everything else must have that type already.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import re
import textwrap
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from sparring.errors import ConfigError

C = TypeVar("C")
Scalar = bool | int | float | str  # what an environment's own setting may be

_TRUE, _FALSE, _NONE = ("true", "yes", "on"), ("false", "no", "off"), "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One setting, as ``--help`` shows it.

    >>> Option(flag="--gate.rate", type="number", default="0.03", doc="Share that is kept.").flag
    '--gate.rate'
    """

    flag: str
    type: str
    default: str
    """As it would be written on the command line; empty when it must be given."""
    doc: str
    """First sentence of the field's docstring."""


@dataclass(frozen=True, slots=True)
class _Setting:
    hint: Any
    default: object
    """``dataclasses.MISSING`` when it must be given."""
    doc: str


# Settings of a class


_cached_hints = functools.cache(get_type_hints)


def _hints(cls: type) -> dict[str, Any]:
    return _cached_hints(cls)


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_group(hint: object) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_mapping(hint: object) -> bool:
    return get_origin(hint) is not None and get_origin(hint) in (Mapping, dict)


def _is_tuple(hint: object) -> bool:
    return get_origin(hint) is tuple


def _optional(hint: object) -> tuple[Any, bool]:
    """The type without None, and whether it admitted None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    members = [each for each in get_args(hint) if each is not type(None)]
    if len(members) == len(get_args(hint)):
        return hint, False
    return functools.reduce(lambda a, b: a | b, members), True


def _settings(cls: type) -> dict[str, _Setting]:
    """Every setting by dotted path, groups opened."""
    return _cached_settings(cls)


@functools.cache
def _cached_settings(cls: type) -> dict[str, _Setting]:
    found: dict[str, _Setting] = {}
    docs = _field_docs(cls)
    for field in dataclasses.fields(cls):
        hint, default = _hints(cls)[field.name], _default(field)
        if not _is_group(hint):
            found[field.name] = _Setting(hint=hint, default=default, doc=docs.get(field.name, ""))
            continue
        for path, setting in _settings(hint).items():
            value = default
            for part in path.split("."):
                value = getattr(value, part, dataclasses.MISSING)
            found[f"{field.name}.{path}"] = dataclasses.replace(setting, default=value)
    return found


def _field_docs(cls: type) -> dict[str, str]:
    """First sentence of the string below each field, from the source; nothing where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = text.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[field.target.id] = re.split(r"(?<=[.!?])\s", " ".join(value.value.split()), maxsplit=1)[0]
    return docs


def describe(cls: type) -> tuple[Option, ...]:
    """A row for every setting of a configuration class, in the order of its fields."""
    rows = []
    for path, setting in _settings(cls).items():
        flag = "--" + path.replace("_", "-") + (".NAME" if _is_mapping(setting.hint) else "")
        default = "" if setting.default is dataclasses.MISSING else _shown(setting.default)
        rows.append(Option(flag=flag, type=type_name(setting.hint), default=default, doc=setting.doc))
    return tuple(rows)


def type_name(hint: object) -> str:
    """A type for people.

    >>> type_name(int | None), type_name(Literal["cpu", "cuda"])
    ('whole number or none', 'cpu | cuda')
    """
    hint, optional = _optional(hint)
    if get_origin(hint) is Literal:
        name = " | ".join(str(each) for each in get_args(hint))
    elif _is_tuple(hint):
        name = f"list of {type_name(get_args(hint)[0])}"
    elif _is_mapping(hint):
        name = f"table of {type_name(get_args(hint)[1])}"
    elif get_origin(hint) in (Union, types.UnionType):
        name = " or ".join(type_name(each) for each in get_args(hint))
    else:
        names: dict[object, str] = {bool: "true | false", int: "whole number", float: "number", str: "text"}
        names[Path] = "path"
        name = names.get(hint, getattr(hint, "__name__", str(hint)))
    return f"{name} or none" if optional else name


def _shown(value: object) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(_shown(each) for each in value)
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_shown(each)}" for key, each in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


# One value


def _convert(path: str, hint: Any, value: object, origin: str) -> Any:
    """``value`` as ``hint`` wants it, or a ConfigError. ``"none"`` is None wherever None may stand."""
    inner, optional = _optional(hint)
    if optional and (value is None or value == _NONE):
        return None
    if inner is Path and isinstance(value, Path):
        value = str(value)
    try:
        converted = msgspec.convert(value, str if inner is Path else inner, strict=True)
        problem = _unfit(converted)
    except (msgspec.ValidationError, TypeError, OverflowError, RecursionError):
        problem = f"expected {type_name(hint)}"
    if problem:
        raise ConfigError(f"{origin}{path}: {problem}, got {_brief(value)}")
    return Path(converted) if inner is Path else converted


def _unfit(value: object) -> str:
    """What is wrong with a value of the right type: what no file could hold or no sum could bear."""
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "expected text in UTF-8"
    if isinstance(value, Mapping):
        return next(filter(None, (_unfit(each) for pair in value.items() for each in pair)), "")
    if isinstance(value, tuple):
        return next(filter(None, map(_unfit, value)), "")
    return ""


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _from_text(hint: Any, text: str) -> object:
    """Text of the command line as a value of the type, unchecked where it cannot be read as such."""
    hint, optional = _optional(hint)
    if optional and text.lower() == _NONE:
        return None
    if _is_tuple(hint):
        inner = get_args(hint)[0]
        return [_from_text(inner, each.strip()) for each in text.split(",") if each.strip()]
    lowered = text.lower()
    if hint == Scalar:
        if len(text) >= 2 and text[0] == text[-1] == '"':
            return text[1:-1]
        if lowered in _TRUE[:1] + _FALSE[:1]:
            return lowered == _TRUE[0]
    elif hint is bool:
        return lowered in _TRUE if lowered in _TRUE + _FALSE else text
    kinds: tuple[type[int] | type[float], ...] = (int, float) if hint == Scalar else (hint,)
    for kind in kinds:
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return text


# From files, command lines and keywords


def load_config(
    cls: type[C], *, toml: Path | None = None, overrides: Sequence[str] = (), positional: Sequence[str] = ()
) -> C:
    """A configuration: the defaults, then the TOML file, then the overrides of the command line.

    Args:
        cls: A configuration class of ``sparring.config``.
        toml: A file; ``--config FILE`` among the overrides names it as well.
        overrides: ``--agents-per-team 4 --gate.rate=0.03 --no-gate.sign-split --trainable red,blue --threads none``.
            Dashes and underscores are the same; of a setting given twice the last counts, lists are put together.
        positional: Settings that take, in this order, the arguments without a name.

    Raises:
        ConfigError: A key is unknown (the nearest one is named), a value has the wrong type, settings contradict each
            other, or the file cannot be read.
    """
    files, given = _parse(cls, overrides, list(positional))
    paths = [*([toml] if toml is not None else []), *files]
    if len(paths) > 1:
        raise ConfigError(f"--config is given twice ({', '.join(map(str, paths))}): put all into one file")
    tree: dict[str, object] = {}
    for path in paths:
        tree = _typed(cls, _read_toml(path), origin=f"{path}: ")
    return _build(cls, _merged(tree, given))


def from_settings(cls: type[C], settings: Mapping[str, object], base: object = None) -> C:
    """A configuration from keywords: dotted (``{"gate.rate": 0.1}``), nested (``{"gate": {"rate": 0.1}}``), or with
    whole groups (``{"gate": GateSettings(rate=0.1)}``). What they leave open comes from ``base``, or the defaults.
    Raises as :func:`load_config` does.
    """
    tree: dict[str, object] = {} if base is None else {name: getattr(base, name) for name in _hints(cls)}
    for name, value in settings.items():
        tree = _merged(tree, _nested(name, value))
    return _build(cls, _typed(cls, tree, origin=""))


def check_types(config: object) -> None:
    """Raise ConfigError for a field of a wrong type: for ``__post_init__``, so that Python callers are checked too."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        hint, value = _hints(type(config))[field.name], getattr(config, field.name)
        if not _is_group(hint):
            _convert(field.name, hint, value, "")
        elif not isinstance(value, hint):
            raise ConfigError(f"{field.name}: expected {hint.__name__}, got {_brief(value)}")


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _typed(cls: type, raw: Mapping[str, object], *, origin: str, prefix: str = "", root: type | None = None) -> Any:
    """The tree with every leaf checked; groups become dictionaries or stay whole instances."""
    tree: dict[str, object] = {}
    root = root or cls
    hints = _hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    for name, value in raw.items():
        path = prefix + name
        if name not in names:
            raise ConfigError(f"{origin}unknown setting {path!r} {_nearest(root, path)}")
        hint = hints[name]
        if not _is_group(hint):
            tree[name] = _convert(path, hint, value, origin)
        elif isinstance(value, hint):
            tree[name] = value
        elif isinstance(value, Mapping):
            tree[name] = _typed(hint, value, origin=origin, prefix=f"{path}.", root=root)
        else:
            example = f"{path}.{dataclasses.fields(hint)[0].name}"
            raise ConfigError(f"{origin}{path}: expected a group of settings, as in {example!r}, got {_brief(value)}")
    return tree


def _merged(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    out = dict(first)
    for name, value in second.items():
        old = out.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = _merged(old, value)
        elif isinstance(value, Mapping) and dataclasses.is_dataclass(old) and not isinstance(old, type):
            value = _merged({each.name: getattr(old, each.name) for each in dataclasses.fields(old)}, value)
        out[name] = value
    return out


def _build(cls: type[C], tree: Mapping[str, object]) -> C:
    values: dict[str, object] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint, default = _hints(cls)[field.name], _default(field)
        if field.name not in tree:
            if default is dataclasses.MISSING:
                raise ConfigError(f"{field.name} is missing: give --{field.name.replace('_', '-')}")
            values[field.name] = default
            continue
        value = tree[field.name]
        if _is_group(hint) and isinstance(value, Mapping):
            value = _build(hint, _merged({name: getattr(default, name) for name in _hints(hint)}, value))
        values[field.name] = value
    return cls(**values)


def _parse(cls: type, overrides: Sequence[str], positional: list[str]) -> tuple[list[Path], dict[str, object]]:
    """The files named by ``--config``, and the tree that the other overrides make."""
    settings = _settings(cls)
    files: list[Path] = []
    tree: dict[str, object] = {}
    lists: dict[str, tuple[object, ...]] = {}
    rest = list(overrides)
    while rest:
        token = rest.pop(0)
        if positional and not token.startswith("-"):
            token = f"--{positional.pop(0)}={token}"
        if not token.startswith("--"):
            raise ConfigError(f"unexpected argument {_brief(token)}: settings are written --name value")
        name, has_value, text = token[2:].partition("=")
        known = name.replace("-", "_")
        if known == "config" and "config" not in settings:
            files.append(Path(text if has_value else _value(token, rest)))
            continue
        path, hint, key = _find(cls, name)
        if hint is bool:
            if key == "no":
                if has_value:
                    raise ConfigError(f"--{name} takes no value")
                text = "false"
            elif not has_value:
                text = rest.pop(0) if rest and rest[0].lower() in _TRUE + _FALSE else "true"
            key = None
        elif not has_value:
            text = _value(token, rest)
        leaf = get_args(hint)[1] if key is not None else hint
        flag = "--" + path.replace("_", "-") + ("" if key is None else f".{key}")
        value = _convert(flag, leaf, _from_text(leaf, text), "")
        if isinstance(value, tuple):
            value = lists[path] = (*lists.get(path, ()), *value)
        tree = _merged(tree, _nested(path, value if key is None else {key: value}))
    return files, tree


def _value(token: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{token} wants a value (one that begins with -- is written {token}=VALUE)")
    return rest.pop(0)


def _find(cls: type, name: str) -> tuple[str, Any, str | None]:
    """The setting that a flag names: path, type, and the key below it (a mapping), or "no" (a switched-off bool)."""
    settings = _settings(cls)
    known = name.replace("-", "_")
    if known in settings and not _is_mapping(settings[known].hint):
        return known, settings[known].hint, None
    if known.startswith("no_") and known[3:] in settings and settings[known[3:]].hint is bool:
        return known[3:], bool, "no"
    for path, setting in settings.items():
        if not _is_mapping(setting.hint):
            continue
        if known.startswith(f"{path}.") and len(known) > len(path) + 1:
            # Names of an environment's settings are Python names; names of teams stay as they are.
            key = known if get_args(setting.hint)[1] == Scalar else name
            return path, setting.hint, key[len(path) + 1 :]
        if known in (path, f"{path}."):
            raise ConfigError(f"--{name} is a table: write --{path.replace('_', '-')}.NAME value")
    group = [path for path in settings if path.startswith(f"{known}.")]
    if group:
        raise ConfigError(f"--{name} is a group of settings: write --{group[0].replace('_', '-')} value, for example")
    raise ConfigError(f"unknown setting --{_brief(name)[1:-1]} {_nearest(cls, known, flag=True)}")


def _nested(path: str, value: object) -> dict[str, object]:
    """``{"gate": {"rate": 0.1}}`` from ``gate.rate`` and 0.1."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _nearest(cls: type, path: str, *, flag: bool = False) -> str:
    """The setting whose path, or last name, is most like ``path``."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, path[:200], candidate).ratio()
        leaf = difflib.SequenceMatcher(None, path[:200].rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.95 * leaf)

    best = max(_settings(cls), key=likeness)
    shown = f"--{best.replace('_', '-')}" if flag else repr(best)
    return f"(did you mean {shown}?)" if likeness(best) >= 0.6 else f"(the nearest is {shown})"


# To TOML


def flatten(config: object) -> dict[str, object]:
    """Every setting by dotted path; mappings stay whole."""
    flat: dict[str, object] = {}
    for path in _settings(type(config)):
        value: object = config
        for part in path.split("."):
            value = getattr(value, part)
        flat[path] = value
    return flat


def changed_settings(old: object, new: object) -> tuple[str, ...]:
    """Dotted paths of the settings in which two configurations of one class differ: what a resume must look at."""
    before, after = flatten(old), flatten(new)
    return tuple(path for path in after if before[path] != after[path])


def to_toml(config: object) -> str:
    """The whole configuration, defaults included, as TOML that :func:`load_config` reads back equal.

    Raises:
        ConfigError: A text setting that may be none is ``"none"``, which would read back as None.
    """
    own: list[str] = []
    tables: dict[str, list[str]] = {}
    for path, value in flatten(config).items():
        _, optional = _optional(_settings(type(config))[path].hint)
        if optional and value == _NONE:
            raise ConfigError(f"{path}: 'none' means that there is none; choose another name")
        group, _, name = path.rpartition(".")
        if isinstance(value, Mapping):
            lines = [f"{_toml_value(key)} = {_toml_value(each)}" for key, each in value.items()]
            tables.setdefault(path, []).extend(lines)
        else:
            (tables.setdefault(group, []) if group else own).append(f"{name} = {_toml_value(value)}")
    blocks = ["\n".join(own), *(f"[{name}]\n" + "\n".join(lines) for name, lines in tables.items())]
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def _toml_value(value: object) -> str:
    if value is None:
        return f'"{_NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # A JSON string is a TOML basic string, but for DEL.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")
