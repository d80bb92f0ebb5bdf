"""Measuring: suites of situations, intervals, baselines that must be beaten, and a seat for a person."""
