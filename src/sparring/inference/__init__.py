"""Samplers: in this process, or any OpenAI-compatible server."""
