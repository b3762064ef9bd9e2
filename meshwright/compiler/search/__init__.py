"""The search: candidates (mesh, stages, schedule, micro-batches, ZeRO, recomputation), their bounds, and the plan that fits."""
