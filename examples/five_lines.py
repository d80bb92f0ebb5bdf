"""Sparring from Python, on an environment of one's own: ``python -m examples.five_lines``."""

from examples.number_duel import NumberDuel

import sparring as sp

report = sp.train_shared(env=NumberDuel, reward="env", model="tiny", ticks=20, worlds=8)
print(report.run, report.reward_mean)
