"""Operators that make what is large a few rows at a time, forward and backward: the logits of a loss, the inside of an MLP."""
