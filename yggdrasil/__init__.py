"""Yggdrasil: speculative decoding of large language models with compiled token trees.

The target writes the text; a small draft guesses ahead; a tree of guesses is verified in one pass of the
target. The text is what the target alone would have written, bit for bit.

Glossary
    root       the last emitted token: its KV is in no cache yet; node 0 of the tree
    accepted   draft tokens that the target agrees with in a step
    bonus      the target's own token after them
    emitted    accepted + 1
    AAL        mean emitted tokens per target forward
    bucket     a compiled token count; the menu is all of them
    row, node, slot, index, position
               a request, an entry of a tree, a place in the KV cache, a count of keys in a row, a RoPE
               position: five kinds of integer, never mixed

Shapes: letters that end a tensor's name
    B rows             N tokens of a forward, nodes of a tree    K verified nodes     W drafted nodes per growth step
    V vocabulary       C candidates per node                     A path capacity      M metadata columns
    E model width      H query heads   G KV heads   F head features   P pages   S slots of a page   L layers or keys, said where it stands
    I input features   O output features of a linear layer            D depths or growth steps, one column each
    R rows of a kernel's block   J keys of a kernel's block           X any further dimensions, said where they stand
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yggdrasil.config import CompileConfig, GenerateConfig, SamplingConfig
    from yggdrasil.errors import YggError
    from yggdrasil.kernels.threads import get_num_threads, set_num_threads
    from yggdrasil.pair import load_pair
    from yggdrasil.tokenizer import TextStream
    from yggdrasil.tree import TokenTree

__all__ = [
    "CompileConfig",
    "GenerateConfig",
    "SamplingConfig",
    "TextStream",
    "TokenTree",
    "YggError",
    "get_num_threads",
    "load_pair",
    "set_num_threads",
]

__version__ = "0.1.0"

_HOMES = {
    "CompileConfig": "config",
    "GenerateConfig": "config",
    "SamplingConfig": "config",
    "TextStream": "tokenizer",
    "TokenTree": "tree",
    "YggError": "errors",
    "get_num_threads": "kernels.threads",
    "load_pair": "pair",
    "set_num_threads": "kernels.threads",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: torch alone costs a second, which `ygg --help` should not."""
    if name in _HOMES:
        return getattr(import_module(f"yggdrasil.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
