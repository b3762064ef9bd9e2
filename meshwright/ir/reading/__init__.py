"""Plans from files: every field is checked for its type, its range and what it refers to before anything uses it.

What is wrong is a PlanError with the path of the field ("graph.ops[3].outputs[0]"). Nothing is imported, looked up in torch or
executed.
"""
