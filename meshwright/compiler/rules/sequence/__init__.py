"""Operators along a sequence: attention, attention within a window, recurrent layers."""
