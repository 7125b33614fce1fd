"""Several processes decode together: rank 0 decides, every rank holds a shard of the target.

```
rank 0                                                  rank 1, 2, ...
engine, policy, draft, tokenizer                        a loop (follow.py)
target.forward(meta) -- "forward, 16 tokens", meta ---> the same graph over its own shard and KV heads
      graph  <------------- gather_ranks -------------> graph
cache.keep_(path)    -- "commit, start, path" --------> moves the same slots
ends                 -- "stop" -----------------------> returns
```

Only rank 0 chooses shapes, since the choice depends on measured times. Only rank 0 has the draft: copies on
other ranks would compute the same tokens.
"""
