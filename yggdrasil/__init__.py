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

Shape letters: they end a tensor's name; `logits_NV` has N rows and V columns
    B  rows of a batch           N  tokens of a forward pass, nodes of a tree
    K  verified nodes            W  nodes of a growth step        D  depths, growth steps
    V  vocabulary                C  candidates of a node          A  longest path
    E  features of the model     M  columns of the metadata
A module that needs other letters lists them at the end of its docstring.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yggdrasil.api import Pair, load_pair
    from yggdrasil.config import CompileConfig, GenerateConfig, SamplingConfig
    from yggdrasil.errors import YggError
    from yggdrasil.kernels.threads import get_num_threads, set_num_threads
    from yggdrasil.report.run import Result, Run
    from yggdrasil.state import Shape
    from yggdrasil.step.decoding_tree import DecodingTree
    from yggdrasil.text.tokenizer import TextStream
    from yggdrasil.tree import TokenTree

__all__ = [
    "CompileConfig",
    "DecodingTree",
    "GenerateConfig",
    "Pair",
    "Result",
    "Run",
    "SamplingConfig",
    "Shape",
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
    "DecodingTree": "step.decoding_tree",
    "GenerateConfig": "config",
    "Pair": "api",
    "Result": "report.run",
    "Run": "report.run",
    "SamplingConfig": "config",
    "Shape": "state",
    "TextStream": "text.tokenizer",
    "TokenTree": "tree",
    "YggError": "errors",
    "get_num_threads": "kernels.threads",
    "load_pair": "api",
    "set_num_threads": "kernels.threads",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: torch takes a second, which `ygg --help` must not."""
    if name in _HOMES:
        return getattr(import_module(f"yggdrasil.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
