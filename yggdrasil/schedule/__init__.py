"""The search for the plan of a step: measure its stages, simulate every plan, try the best one."""
