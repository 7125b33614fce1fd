"""Several ranks: messages over the link, shards, and refusals.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny_pair
import torch
from torch import Tensor, nn

from yggdrasil.errors import ConfigError, RankLost, UnsupportedModel
from yggdrasil.kv import KVShape
from yggdrasil.models.sharding import GatheredLinear, SummedLinear, check_divisible, shard_
from yggdrasil.page_order import by_slot, in_pages
from yggdrasil.ranks.follow import follow
from yggdrasil.ranks.launch import local_rank, num_ranks, rank
from yggdrasil.ranks.lead import Leader, LeadingCache
from yggdrasil.ranks.link import COMMIT, FORWARD, LOAD, STOP, Message

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, capacity=32)


@dataclass
class Wire:
    """Both ends of a link in one process: what rank 0 gives is queued, the follower takes it from the
    queue.
    """

    queue: list[Any] = field(default_factory=list)
    leads: bool = True

    def message(self, message: Message | None = None) -> Message:
        return self._pass(message)  # type: ignore[no-any-return]

    def tensor(self, values: Tensor) -> Tensor:
        if self.leads:
            self.queue.append(values.clone())
            return values
        values.copy_(self.queue.pop(0))
        return values

    def payload(self, value: Any = None) -> Any:
        return self._pass(value)

    def use_device(self, device: str) -> None: ...

    def close(self) -> None: ...

    def _pass(self, value: Any) -> Any:
        if self.leads:
            self.queue.append(value)
            return value
        if not self.queue:
            raise RankLost(1, 2, "Connection closed by peer\nat some line")
        return self.queue.pop(0)


@dataclass
class Recorded:
    """A follower's model that notes what it was made to do."""

    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache: Any = self

    def meta(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, 3, dtype=torch.int32)

    def forward(self, meta_NM: Tensor) -> None:
        self.calls.append(meta_NM.tolist())

    def keep_(self, row: int, start: int, path: Sequence[int]) -> None:
        self.calls.append((row, start, list(path)))


@pytest.mark.usefixtures("kernels")
def test_a_follower_runs_messages_in_order_until_stop() -> None:
    wire = Wire()
    model = Recorded()
    leader = Leader(wire)
    meta_NM = torch.arange(6, dtype=torch.int32).view(2, 3)
    leader.load("bundle", "cpu")
    wire.message(Message(FORWARD, 2))
    wire.tensor(meta_NM)
    cache = LeadingCache(leader, SHAPE, dtype=torch.float32, device="cpu")
    cache.commit_([0, 1, 2])  # a chain lies where it belongs: no message
    cache.commit_([0, 2])
    leader.stop()
    assert [entry.kind for entry in wire.queue if isinstance(entry, Message)] == [
        LOAD,
        FORWARD,
        COMMIT,
        STOP,
    ]
    loaded: list[Any] = []
    wire.leads = False
    follow(wire, lambda bundle: loaded.append(bundle) or model)
    assert (loaded, model.calls, wire.queue) == (["bundle"], [meta_NM.tolist(), (0, 3, [0, 2])], [])


@pytest.mark.usefixtures("kernels")
def test_a_follower_moves_the_slots_that_rank_0_moves() -> None:
    wire = Wire()
    leading = LeadingCache(Leader(wire), SHAPE, dtype=torch.float32, device="cpu")
    following = LeadingCache(Leader(Wire()), SHAPE, dtype=torch.float32, device="cpu")
    for cache in (leading, following):
        slots_PL2GSF = torch.arange(32.0).view(2, 1, 1, 1, 16, 1).expand_as(cache.storage_PL2GSF)
        cache.storage_PL2GSF.copy_(in_pages(slots_PL2GSF))
    leading.commit_([0, 1])
    leading.commit_([0, 3, 4])
    leading.rollback_(4)
    leading.commit_([1])
    Leader(wire).stop()
    wire.leads = False
    wire.queue[:0] = [Message(LOAD), None]
    model = Recorded()
    model.cache = following
    follow(wire, lambda _: model)  # type: ignore[arg-type, return-value]
    assert torch.equal(following.storage_PL2GSF, leading.storage_PL2GSF)
    assert by_slot(leading.storage_PL2GSF)[0, 0, 0, 0, :5, 0].tolist() == [0, 1, 2, 5, 5]


def test_a_follower_without_rank_0_ends_with_an_error() -> None:
    with pytest.raises(
        RankLost, match=r"rank 1 of 2 lost another rank, .*: Connection closed by peer; start the run again"
    ):
        follow(Wire(leads=False), lambda _: Recorded())  # type: ignore[arg-type, return-value]


def test_an_interrupt_waits_for_the_end_of_an_exchange() -> None:
    leader = Leader(Wire())
    sent = []
    with pytest.raises(KeyboardInterrupt), leader.exchange():
        leader.on_interrupt()
        sent.append("the rest")
    assert sent == ["the rest"]
    with leader.exchange():
        pass  # raised once
    with pytest.raises(KeyboardInterrupt):
        leader.on_interrupt()


def test_stopping_ranks_that_are_gone_is_no_error() -> None:
    class Gone(Wire):
        sent = 0

        def message(self, message: Message | None = None) -> Message:
            self.sent += 1
            raise RankLost(0, 2, "Connection reset")

    wire = Gone()
    leader = Leader(wire)
    leader.stop()
    leader.stop()  # one that hangs would keep rank 0 waiting for nothing
    assert wire.sent == 1


def test_a_process_has_a_rank_only_if_torchrun_sets_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (num_ranks(), rank(), local_rank()) == (1, 0, 0)
    monkeypatch.setenv("RANK", "3")
    assert (num_ranks(), rank(), local_rank()) == (4, 3, 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_rank() == 1
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE: 'many'"):
        num_ranks()


def model_of(architecture: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(tiny_pair.random_config(architecture, num_layers=1)).eval()


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox"])
def test_shards_put_together_are_the_model(architecture: str) -> None:
    whole = model_of(architecture)
    shards = []
    for each in range(2):
        shard = model_of(architecture)
        shard.load_state_dict(whole.state_dict())
        shard_(shard, each, 2)
        shards.append(shard)
    seen = {"colwise": 0, "summed": 0, "gathered": 0}
    for name, linear in whole.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        parts = [shard.get_submodule(name) for shard in shards]
        kind = (
            "summed"
            if isinstance(parts[0], SummedLinear)
            else "gathered"
            if isinstance(parts[0], GatheredLinear)
            else "colwise"
        )
        seen[kind] += 1
        weights = [(part if kind == "colwise" else part.linear).weight for part in parts]
        assert torch.equal(torch.cat(weights, dim=1 if kind == "summed" else 0), linear.weight)
        if linear.bias is not None:
            biases = [(part.linear if kind == "gathered" else part).bias for part in parts]
            assert torch.equal(biases[0] if kind == "summed" else torch.cat(biases), linear.bias)
    assert seen == (
        {"colwise": 5, "summed": 2, "gathered": 1}
        if architecture == "qwen3"
        else {"colwise": 2, "summed": 2, "gathered": 1}
    )


class OneLayer(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Linear, style: str) -> None:
        super().__init__()
        self.layer = layer
        self.tp_plan = {"layer": style}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("style", ["rowwise", "colwise_gather_output"])
def test_the_layers_of_two_shards_give_what_the_whole_layer_gives(
    style: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = nn.Linear(32, 20, bias=bias)
    x = torch.randn(1, 3, 32)
    shards: list[Any] = [OneLayer(whole, style) for _ in range(2)]
    for each, shard in enumerate(shards):
        shard_(shard, each, 2)
    own = x.chunk(2, dim=-1) if style == "rowwise" else (x, x)
    parts = torch.stack([shard.layer.linear(each) for shard, each in zip(shards, own, strict=True)])
    monkeypatch.setattr(torch.ops.ygg, "gather_ranks", lambda mine, num_ranks: parts)
    first, second = (shard.layer(each) for shard, each in zip(shards, own, strict=True))
    torch.testing.assert_close(first, whole(x))
    assert torch.equal(first, second)


def test_a_shard_of_tied_weights_is_stored_as_itself() -> None:
    config = tiny_pair.random_config("qwen3", num_layers=1)
    config.tie_word_embeddings = True
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    shard_(model, 0, 2)
    assert model.lm_head.linear.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()


def test_what_cannot_be_shared_out_is_refused_by_name() -> None:
    config = tiny_pair.random_config("qwen3", num_layers=1)
    check_divisible(config, 2)
    with pytest.raises(
        ConfigError,
        match=r"--nproc-per-node: 3 is not allowed; it must be .* divides the target's 4 attention heads",
    ):
        check_divisible(config, 3)
    with pytest.raises(ConfigError, match="2 key/value heads"):
        check_divisible(config, 4)
    config.intermediate_size = 129
    with pytest.raises(ConfigError, match="129 features of a feed-forward layer"):
        check_divisible(config, 2)
    model = model_of("qwen3")
    model._tp_plan = {"model.layers.*.self_attn.o_proj": "rowwise_split_input"}
    with pytest.raises(UnsupportedModel, match="'rowwise_split_input' for a Linear"):
        shard_(model, 0, 2)
    model._tp_plan = {"model.layers.*.mlp.gate_up_proj": "colwise"}
    with pytest.raises(
        UnsupportedModel, match="names .model.layers.*mlp.gate_up_proj., which the model does not have"
    ):
        shard_(model, 0, 2)
    model._tp_plan = {}
    with pytest.raises(UnsupportedModel, match="no tensor-parallel plan"):
        shard_(model, 0, 2)


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    model = model_of("qwen3")
    model.lm_head = nn.Linear(64, 383, bias=False)
    shard_(model, 1, 2)
    assert model.lm_head.weight.shape == (383, 64)
