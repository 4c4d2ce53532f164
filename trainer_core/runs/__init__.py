"""Run folder, record, registry, worker protocol and supervisor. Nothing here imports torch."""
