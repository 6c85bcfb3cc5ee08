"""Mutants that change nothing that may be relied on, and why."""

EQUIVALENT: dict[tuple[str, str], dict[int, str]] = {}
