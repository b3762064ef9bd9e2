"""From a model to a plan: capture, rules, placement, stages, search. Knows costs and values, never how a plan runs."""
