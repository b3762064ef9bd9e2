"""Which factor each mesh axis splits: the legal choices, their prices, and the problem that the solver reads."""
