"""Numbers with units as text: three digits and a fitting unit, the same wherever a plan is printed."""

from __future__ import annotations


def seconds_text(value: float) -> str:
    """A duration; more digits than three before a thousand seconds and more, rather than an exponent.

    >>> seconds_text(0.01213), seconds_text(74.2), seconds_text(3.5e-6), seconds_text(0.9996), seconds_text(12345.0)
    ('12.1 ms', '74.2 s', '3.5 us', '1 s', '12345 s')
    >>> seconds_text(4.69e-9), seconds_text(0.0)
    ('4.69 ns', '0 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:  # what rounds to a thousand of a unit is one of the next
            return f"{value / size:.0f} {unit}" if value >= 999.5 * size else f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns" if 0 < value < 0.9995e-7 else f"{value * 1e6:.3g} us"


def count_text(number: int, what: str) -> str:
    """A number of things, as a plural where they are not one.

    >>> count_text(1, "stage"), count_text(8, "stage"), count_text(2048, "micro-batch")
    ('1 stage', '8 stages', '2,048 micro-batches')
    """
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def bytes_text(bytes_: float) -> str:
    """Bytes, with a binary unit; four digits before the next larger unit begins.

    >>> bytes_text(79.5 * 2**30), bytes_text(1020 * 2**20), bytes_text(512)
    ('79.5 GiB', '1020 MiB', '512 B')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if bytes_ >= 2**power:
            value = bytes_ / 2**power
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{bytes_:.0f} B"
