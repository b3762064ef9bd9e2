"""Published models and systems, to be priced beside what was published."""
