"""Decisions of a plan as a person writes them: names of operators and blocks, choices, all of them as pins."""
