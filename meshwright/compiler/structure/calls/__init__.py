"""What a call of a captured model finds changed since it was captured: attributes, globals, the mode."""
