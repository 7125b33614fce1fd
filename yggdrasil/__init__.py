from yggdrasil.tree import TokenTree
