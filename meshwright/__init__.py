"""meshwright: a declarative graph compiler that parallelizes an unmodified PyTorch model."""
