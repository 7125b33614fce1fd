"""Files that outlive a process: written whole, checked by digest, loaded only where trusted."""
