"""Attention whose sequence is split: blocks of queries on blocks of keys, merged."""
