"""What lies above one layout: mesh factorizations, stages, schedules, micro-batches, ZeRO, recomputation."""
