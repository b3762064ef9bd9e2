"""What torch.export gives: made functional, then read."""
