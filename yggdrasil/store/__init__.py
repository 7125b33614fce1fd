"""Files that outlive a process: written whole or not at all, checked by digest, loaded only where trusted."""
