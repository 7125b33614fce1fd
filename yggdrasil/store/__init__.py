"""Files of the store: written atomically, checked by digest, loaded only from trusted folders."""
