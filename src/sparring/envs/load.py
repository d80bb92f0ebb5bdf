"""Finding an environment by name: built in, or a user's own ``package.module:Class``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from sparring.envs.contract import Env
from sparring.errors import ConfigError, EnvError, nearest

BUILT_IN = {"market": "sparring.envs.market.world:MarketEnv"}


def load_env(name: str, *, rules: str = "brief", settings: Mapping[str, object] | None = None) -> Env:
    """A fresh environment. ``settings`` go to its constructor as keywords; so does ``rules`` to a built-in one.

    An address (``http://...``) is a market server (``sparring serve market``).

    Modules are looked for as Python does, and in the working folder.

    Raises:
        ConfigError: No such environment, or it does not take the settings.
        EnvError: It lacks a member of the contract.
    """
    if name.startswith(("http://", "https://")):
        return _on_server(name, rules, dict(settings or {}))
    place = BUILT_IN.get(name, name)
    module_name, colon, class_name = place.partition(":")
    if not colon or not module_name or not class_name:
        raise ConfigError(
            f"env is {name!r}: name a built-in environment, package.module:Class, or a market server's address"
            f"{nearest(name, BUILT_IN)}"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ConfigError(
                f"env is {name!r}: there is no module {error.name} (looked in {Path.cwd()} too)"
            ) from error
        raise ConfigError(f"env is {name!r}: its module wants {error.name}, which is not installed") from error
    maker = getattr(module, class_name, None)
    if maker is None:
        raise ConfigError(f"env is {name!r}: {module_name} has no {class_name}{nearest(class_name, vars(module))}")
    keywords = dict(settings or {})
    if name in BUILT_IN:
        keywords["rules"] = rules
    try:
        env = maker(**keywords)
    except TypeError as error:
        raise ConfigError(f"env_settings: {name} does not take them: {error}") from error
    missing = [member for member in MEMBERS if not hasattr(env, member)]
    if missing:
        raise EnvError(f"{name} is no environment: it lacks {', '.join(missing)} (see sparring.envs.contract.Env)")
    found: Env = env
    return found


def _on_server(url: str, rules: str, settings: dict[str, object]) -> Env:
    from sparring.envs.market.remote import RemoteMarket

    try:
        return RemoteMarket(url, rules=rules, **settings)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"env_settings: a market server does not take them: {error}") from error


MEMBERS = (
    "name", "teams", "rules", "team_rules", "action_type", "facts_type", "reset", "observe", "render", "step",
    "snapshot", "restore",
)  # fmt: skip
