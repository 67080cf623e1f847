"""How times and numbers are shown."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """
    >>> clock(75.2), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def quantity(value: float) -> str:
    """
    >>> quantity(7.31), quantity(812.0), quantity(2913.0), quantity(1_200_000)
    ('7.3', '812', '2.9k', '1.2M')
    """
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e3:
        return f"{value / 1e3:.1f}k"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
