"""`ygg compile`: build, measure, calibrate, train. Nothing here runs during decoding."""
