"""Checkpoints: everything needed to go on exactly, written whole or not at all."""
