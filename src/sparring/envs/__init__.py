"""Environments: worlds in which agents act. No torch, no rewards, no learning in here."""
