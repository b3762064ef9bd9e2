"""Stages under torch's pipeline schedules."""
