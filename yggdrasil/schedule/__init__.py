"""An iteration as stages, plans that order them, the search for the best plan, and the executor."""
