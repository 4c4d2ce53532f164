"""What watches a run and acts between its steps: signals, verdicts, culprits, quarantine, the escalation ladder."""
