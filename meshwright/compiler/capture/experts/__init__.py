"""Mixtures of experts, brought to one operator however a model spells them."""
