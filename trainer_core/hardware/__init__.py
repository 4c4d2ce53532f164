"""The device that a run computes on: its own faults, and settings that suit it."""

HARDWARE = "HARDWARE"
"""Verdict, and kind of a trigger, of a faulty device."""
