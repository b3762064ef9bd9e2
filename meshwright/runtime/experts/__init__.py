"""Mixtures of experts as they run: rows to where their experts are, grouped products, rows back."""
