"""What is declared about operators apart from their sharding rules: cost, what autograd keeps, recomputation (``operator``)."""
