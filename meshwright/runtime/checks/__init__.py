"""What is right or refused on every rank: calls (``calls``) and backwards (``gradients``)."""
