"""Numbers in, numbers out: the best choice for every copy of every block, with a certified gap."""
