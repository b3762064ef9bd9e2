"""The rule of a function with a backward of its own, made of the rules of the operators inside (``splits``)."""
