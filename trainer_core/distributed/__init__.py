"""Several processes on one run: the step's samples are shared out, everything else happens once, in process 0."""
