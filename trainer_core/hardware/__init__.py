"""The device that a run computes on: its own faults, and settings that suit it."""
