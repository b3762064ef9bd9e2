"""What a graph is made of before anything is placed: repeated blocks, units, dims, micro-batches, activations."""
