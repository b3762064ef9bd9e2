"""Runs a program; never plans and knows no rules."""
