"""What looks at a plan: facts, page, explanations, differences, traces."""
