"""Compile the equal layers of a deep model once: an exported graph as a sequence of regions.

```
nodes     embedding, sines | layer 0 | layer 1 | ... | layer 27 | norm, head
region            0             1         2                28         29
kind              0             1         1                 1          2      three are compiled
```

A region is a run of neighbouring nodes. Its weights and its part of the cache are inputs, so equal layers
are one kind. A graph that is compiled as a whole takes Inductor time in proportion to its layers.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

__all__ = ["Region", "Regions", "compile_regions", "read_regions", "regions_of"]

NAME_OF_INPUT = "meta"
FILE = "regions.json"
Signature = tuple[Any, ...]


class Regions(NamedTuple):
    """The regions in order, as kernels/graph.cpp runs them; none for a graph that was compiled as a whole.

    Args:
        kinds: The kind of every region.
        inputs: For every region the names of its inputs: of weights and buffers as in the module, of the
            graph's input as NAME_OF_INPUT, or of an earlier region's outputs.
        outputs: For every region the names of its outputs. Those of the last are the graph's.
    """

    kinds: Sequence[int] = ()
    inputs: Sequence[Sequence[str]] = ()
    outputs: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Region:
    """A run of nodes as a graph of its own.

    Args:
        inputs: The nodes of the exported graph that it reads.
        outputs: Those of its nodes that others read, or that the exported graph returns.
    """

    graph: Graph
    inputs: list[Node]
    outputs: list[Node]


def regions_of(exported: ExportedProgram) -> tuple[Regions, list[Region]] | None:
    """Split a graph before and after every layer.

    Returns:
        The regions in order, and one of every kind. None for a graph that cannot be split, or whose layers
        differ so much that it would save nothing.
    """
    graph = exported.graph_module.graph
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    layers = [_layer_of(node) for node in calls]
    if any(node.op != "call_function" for node in calls) or len({*layers} - {None}) < 2:
        return None
    results = list(graph.output_node().args[0])
    regions = [_region(nodes, results) for nodes in _split(calls, layers)]
    crossing = [node for region in regions for node in (*region.inputs, *region.outputs)]
    if set(results) - set(regions[-1].outputs) or not all(_is_tensor(node) for node in crossing):
        return None
    kinds: dict[Signature, int] = {}
    kind_of = [kinds.setdefault(_signature(region), len(kinds)) for region in regions]
    if 2 * len(kinds) > len(regions):
        return None
    names = {spec.arg.name: spec.target or NAME_OF_INPUT for spec in exported.graph_signature.input_specs}

    def named(nodes: Sequence[Node]) -> list[str]:
        return [names.get(node.name, node.name) for node in nodes]

    inputs = [named(region.inputs) for region in regions]
    outputs = [named(region.outputs) for region in regions]
    of_kind = [regions[kind_of.index(kind)] for kind in range(len(kinds))]
    return Regions(kind_of, inputs, outputs), of_kind


def compile_regions(
    regions: Regions, of_kind: Sequence[Region], path: Path, options: dict[str, Any]
) -> None:
    """Write a package with a model `region_K` for every kind K, and the order of the regions.

    Args:
        regions: First result of `regions_of`.
        of_kind: Its second result.
        options: For Inductor.
    """
    from torch.export.pt2_archive._package import package_pt2

    files: dict[str, Any] = {}
    for kind, region in enumerate(of_kind):
        inputs = tuple(_like(node.meta["val"]) for node in region.inputs)
        module = GraphModule(torch.nn.Module(), region.graph)
        files[f"region_{kind}"] = torch._inductor.aot_compile(
            module, inputs, options={**options, "aot_inductor.package": True}
        )
    package_pt2(str(path), aoti_files=files, extra_files={FILE: json.dumps(regions)})


def read_regions(path: Path) -> Regions:
    """The regions of a package.

    Raises:
        OSError, BadZipFile, ValueError, TypeError: it is missing or damaged.
    """
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(f"/extra/{FILE}"):
                return Regions(*json.loads(archive.read(name)))
    return Regions()


def _layer_of(node: Node) -> int | None:
    """The number of the layer whose module called the node: the first number in the module's name."""
    for name, _ in node.meta.get("nn_module_stack", {}).values():
        if found := re.search(r"\.(\d+)(?:\.|$)", name):
            return int(found[1])
    return None


def _split(calls: Sequence[Node], layers: Sequence[int | None]) -> list[Sequence[Node]]:
    """The nodes in runs: before the layers, those of each layer, and after the last one."""
    starts = {0}
    for layer in {each for each in layers if each is not None}:
        starts.add(layers.index(layer))
    last = max(place for place, layer in enumerate(layers) if layer is not None)
    cuts = [*sorted(starts), last + 1, len(calls)]
    return [calls[start:end] for start, end in pairwise(cuts) if start < end]


def _region(nodes: Sequence[Node], results: Sequence[Node]) -> Region:
    inside = {*nodes}
    read = dict.fromkeys(each for node in nodes for each in node.all_input_nodes)
    inputs = [node for node in read if node not in inside]
    outputs = [
        node for node in nodes if any(user not in inside and user.op != "output" for user in node.users)
    ]
    outputs += [node for node in results if node in inside and node not in outputs]
    graph = Graph()
    copies = {}
    for place, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{place}")
        copies[node].meta["val"] = node.meta["val"]  # Inductor takes these shapes, which are static
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Region(graph, inputs, outputs)


def _signature(region: Region) -> Signature:
    """Equal for regions that compute the same of their inputs."""
    place_of = {node: place for place, node in enumerate(region.graph.nodes)}

    def places(arguments: Any) -> str:
        return repr(map_arg(arguments, lambda node: f"%{place_of[node]}"))

    inputs = [node.meta["val"] for node in region.inputs]
    return (
        *((value.shape, value.stride(), value.dtype, value.device) for value in inputs),
        *((node.target, places(node.args), places(node.kwargs)) for node in region.graph.nodes),
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _like(value: Tensor) -> Tensor:
    """An uninitialised tensor of the same kind."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
