"""Memory: how much a run takes, what is done under pressure, and what happens when there is none left."""
