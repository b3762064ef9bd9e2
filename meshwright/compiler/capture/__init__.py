"""A module becomes a graph in normal form."""
