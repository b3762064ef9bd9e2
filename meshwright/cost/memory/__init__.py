"""What a rank holds at the worst moment of a step, replayed from its program."""
