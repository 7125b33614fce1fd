"""Several processes, one run: rank 0 decodes, every rank holds a shard of the target.

```
rank 0                                                       rank 1, 2, ...
engine, policy, draft, tokenizer: all there is to decide     a loop (follow.py)
target.forward(meta) -- "forward, 16 tokens", meta --------> the same graph, its own shard and KV heads
      graph  <-------------- gather_ranks -----------------> graph
cache.commit_(path)  -- "commit, length, path" ------------> moves the same slots
leaves               -- "stop" ----------------------------> returns
```

Shapes are chosen by the clock, so only one rank may choose. The draft is on rank 0 alone, whole: a copy on
every rank would compute the same guesses from the same metadata, for nobody."""
