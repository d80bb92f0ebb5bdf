"""A process that is killed again and again: ``python killed_run.py CONFIG HOW SEED``, in the folder of ``runs/``.

It loads the libraries once and forks a child for each start or resume of the run, so that a kill costs a fraction of a
second. HOW is ``moments`` (SIGKILL after a random time) or ``calls`` (the child kills itself at its n-th call that
renames, syncs or removes something on the disk, before the call or right after it; n is drawn anew for each child).
Prints the number of kills as its last line.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft  # noqa: F401  (loaded before the fork)
import torch
import transformers  # noqa: F401

from sparring.config import SharedConfig, load_config
from sparring.loops.shared import train_shared

CALLS = ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"), (os, "unlink"))
MOST_KILLS = 400


def die_at(number: int) -> None:
    """SIGKILL to this process at the number-th of CALLS; every second number right after the call."""
    left = number

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and number % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **keywords)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for module, name in CALLS:
        setattr(module, name, dying(getattr(module, name)))


def child(config: SharedConfig, run: Path, number: int | None) -> None:
    if number is not None:
        die_at(number)
    begun = (run / "config.toml").is_file()
    train_shared(config, resume=run if begun else None)


def main() -> None:
    config = replace(load_config(SharedConfig, toml=Path(sys.argv[1]), overrides=()), run="killed")
    how, rng = sys.argv[2], random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    run, kills = Path("runs/killed"), 0
    while kills < MOST_KILLS:
        number = rng.randint(1, 40) if how == "calls" else None
        pid = os.fork()
        if pid == 0:
            try:
                child(config, run, number)
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        if how == "moments":
            time.sleep(rng.uniform(0.1, 1.5))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                sys.exit(f"the child failed after {kills} kills")
            break
        kills += 1
    else:
        sys.exit("it never came to its end")
    print(kills)


if __name__ == "__main__":
    main()
