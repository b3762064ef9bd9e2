"""Where stored tensors lie, how they are filled, saved and loaded."""
