"""Prices: pure functions of numbers with units."""
