"""How a model changes gradients other than by its operators: functions with a backward of their own, and hooks."""
