"""Settled turns in, better weights out: ``advantages -> gate -> batch -> step``.

Nothing is imported here, so that ``sparring.learning.settings`` loads without torch.
"""
