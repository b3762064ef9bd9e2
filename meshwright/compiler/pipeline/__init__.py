"""Where a sequence of units is cut into stages, and what no cut can beat."""
