"""Other engines as arms of a claim, each in a process of its own."""
