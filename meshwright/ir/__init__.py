"""The values that everything shares: what a model computes, where it lives, what was decided, and what a rank runs."""
