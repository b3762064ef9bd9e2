"""Numbers with units as text: three digits and a fitting unit, the same wherever a plan is printed."""

from __future__ import annotations


def seconds_text(value: float) -> str:
    """A duration.

    >>> seconds_text(0.01213), seconds_text(74.2), seconds_text(3.5e-6)
    ('12.1 ms', '74.2 s', '3.5 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


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
