"""Speculative decoding writes what plain decoding writes, and plain decoding what transformers writes.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from conftest import COMPRESSED, SMALLEST, compiled

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.graphs import compile_graph
from yggdrasil.compiler.workers import GraphJob, compile_graphs
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine, check_request
from yggdrasil.errors import ConfigError, ShapeNotCompiled, YggError
from yggdrasil.kernels.compilations import compilations, no_compilation
from yggdrasil.kernels.threads import get_num_threads, set_num_threads
from yggdrasil.kv import KVCache
from yggdrasil.models.forward import DraftForward, TargetForward
from yggdrasil.models.load import load_model, pack_linears_
from yggdrasil.models.packing import empty_meta, pack_chain_, pack_nodes_
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.policy.guard import Guard
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import REPEATS, FixedShape
from yggdrasil.policy.uncalibrated import UNCALIBRATED, plain_policy
from yggdrasil.report.run import Run
from yggdrasil.state import PLAIN, DecodeState, Row, Shape
from yggdrasil.step import rows as rows_module
from yggdrasil.step.choice import VERIFY_ALL, Choice
from yggdrasil.step.growth import draft_rows, prefill
from yggdrasil.step.rows import StepOverRows
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

PROMPTS = ("Once upon a time", "Tom", "One day Lily saw a red fox near the café.", "xyz 123")
# None: the best shape by Eq. 3
SHAPES = (Shape(1, 1), Shape(1, 4), Shape(4, 1, 4), Shape(4, 4), Shape(4, 4, 16), Shape(4, 2, 3), None)
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.95, seed=7)


def decode(
    pair: LoadedPair,
    prompt: str | list[int],
    shape: Shape | None,
    *,
    plain: bool = False,
    num_tokens: int = 64,
    **options: Any,
) -> list[int]:
    """The emitted tokens."""
    sampling = options.pop("sampling", SamplingConfig())
    config = GenerateConfig(max_new_tokens=num_tokens, sampling=sampling, plain=plain, **options)
    policy = plain_policy() if plain else pair.policy(temperature=sampling.temperature, shape=shape)
    tokens = pair.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return [token for result in pair.engine.generate(tokens, policy, config) for token in result.tokens]


def engine_by_stages(pair: LoadedPair) -> Engine:
    """The specification of the step, over the pair's models."""
    models = pair.engine.target, pair.engine.draft
    stepper = StepOverRows(*models, Trace())
    return Engine(*models, max_context=pair.bundle.max_context, stepper=stepper)


@pytest.fixture(params=("in one call", "by stages"))
def engine(request: pytest.FixtureRequest, tiny: LoadedPair) -> Engine:
    """Both forms of the step."""
    return tiny.engine if request.param == "in one call" else engine_by_stages(tiny)


@pytest.fixture(scope="module")
def transformers_texts(llama_folders: tuple[str, str], tiny: LoadedPair) -> dict[str, list[int]]:
    """What transformers' own greedy generation writes after every prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folders[0], dtype=torch.float32).eval()
    texts = {}
    for prompt in PROMPTS:
        tokens = torch.tensor([tiny.tokenizer.encode(prompt)])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=64,
            pad_token_id=0,
        )
        texts[prompt] = out[0, tokens.shape[1] :].tolist()
    return texts


@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculative_equals_plain_and_transformers(
    tiny: LoadedPair, transformers_texts: dict[str, list[int]], prompt: str
) -> None:
    plain = decode(tiny, prompt, None, plain=True)
    assert plain == transformers_texts[prompt]
    for shape in SHAPES:
        assert decode(tiny, prompt, shape) == plain, f"shape {shape}"


@pytest.mark.parametrize("sampling", (SamplingConfig(), SAMPLED), ids=("greedy", "sampled"))
def test_a_tree_with_grafts_writes_what_plain_decoding_writes(
    tiny: LoadedPair, engine: Engine, sampling: SamplingConfig
) -> None:
    pair = replace(tiny, engine=engine)
    prompt = tiny.tokenizer.encode("The red fox ran. The owl saw the fox. The red fox ran. The owl")
    plain = decode(pair, prompt, None, plain=True, sampling=sampling, num_tokens=48, ignore_eos=True)
    for shape in (Shape(1, 2, graft=2), Shape(4, 4, graft=3), Shape(4, 4, 6, graft=15), REPEATS):
        text = decode(pair, prompt, shape, sampling=sampling, num_tokens=48, ignore_eos=True)
        assert text == plain, str(shape)


def test_a_graft_does_not_end_a_text_before_its_context(tiny: LoadedPair, engine: Engine) -> None:
    """A path ends somewhere, so a graft takes the place of growth steps: it needs no more KV."""
    pair = replace(tiny, engine=engine)
    prompt = [10, 11, 12, 13, 14, 15, 16] * 60
    prompt = prompt[: engine.max_context - 20]
    plain = decode(pair, prompt, None, plain=True, num_tokens=20, ignore_eos=True)
    for shape in (Shape(4, 4, graft=15), Shape(4, 2, graft=1000), REPEATS):
        assert decode(pair, prompt, shape, num_tokens=20, ignore_eos=True) == plain, str(shape)


def test_a_graft_is_drafted_where_the_text_repeats(tiny: LoadedPair, engine: Engine) -> None:
    """A root, three grafted nodes, one of growth; the draft has run all but the last."""
    prompt = [10, 11, 12, 13, 14, 15, 16] * 4
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, prompt[:-1])
    state = DecodeState(list(prompt))
    result = engine.step(state, tiny.policy(shape=Shape(1, 1, 5, graft=3)))
    assert result.drafted == 5
    assert result.tree.token_N[:4].tolist() == [16, 10, 11, 12]
    assert engine.draft.cache.len == len(prompt) - 1 + min(result.accepted + 1, 4)


@pytest.mark.parametrize("prompt_len", (1, 2, 9, 16, 17, 18, 32, 33, 34, 49, 50, 70))
def test_verifying_the_first_tree_with_the_end_of_the_prompt_changes_nothing(
    tiny: LoadedPair, engine: Engine, prompt_len: int
) -> None:
    """Chunks have 32 tokens here; up to 16 tokens of the last one run in the first verification."""
    prompt = [(5 * place) % 60 + 4 for place in range(prompt_len)]
    state = DecodeState(list(prompt))
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, prompt[:-1])  # the whole prompt separately
    while len(state.emitted) < 12:
        engine.step(state, plain_policy())
    expected = list(state.emitted)
    pair = replace(tiny, engine=engine)
    for shape in (PLAIN, Shape(4, 4, 16), Shape(1, 4)):
        assert decode(pair, prompt, shape, num_tokens=12, ignore_eos=True) == expected, str(shape)


def test_a_short_prompt_needs_no_separate_forward(tiny: LoadedPair) -> None:
    passes = list[int]()
    record_forwards_ = tiny.engine.target.record_forwards_

    def no_forward(meta_NM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a pass of its own")

    def counted(ms: float, each: Callable[[], Iterable[tuple[int, float, float]]]) -> None:
        passes.extend(num_tokens for num_tokens, _, _ in each())
        record_forwards_(ms, each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.engine.target, "forward", no_forward)
        patch.setattr(tiny.engine.target, "record_forwards_", counted)
        next(
            iter(
                tiny.engine.generate(
                    list(range(10, 20)), tiny.policy(shape=Shape(1, 4)), GenerateConfig(max_new_tokens=4)
                )
            )
        )
    assert passes == [14]  # nine tokens of the prompt and a tree of five


@pytest.mark.parametrize("num_tokens", (17, 18, 32, 33, 34, 49, 50, 64, 65))
def test_a_long_end_of_a_prompt_emits_the_first_token_without_a_draft(
    tiny: LoadedPair, num_tokens: int
) -> None:
    """The draft runs over the prompt after that, and the tokens are those of plain decoding."""
    chunk = tiny.engine.target.prefill_chunk
    room = chunk - tiny.engine.target.widest
    assert (chunk, room) == (32, 16)
    prompt = (tiny.tokenizer.encode(PROMPTS[0]) * num_tokens)[:num_tokens]
    expected = decode(tiny, prompt, None, plain=True, num_tokens=12, ignore_eos=True)
    config = GenerateConfig(max_new_tokens=12, ignore_eos=True)
    steps = tiny.engine.generate(prompt, tiny.policy(shape=Shape(2, 3)), config)
    first = next(steps)
    is_long = (num_tokens - 1) % chunk > room
    assert first.caught_up == is_long
    assert (first.shape == PLAIN) == is_long
    assert (tiny.engine.draft.cache.len == 0) == is_long
    later = list(steps)
    assert all(result.shape.depth and not result.caught_up for result in later)
    assert [token for result in (first, *later) for token in result.tokens] == expected


def test_a_plain_request_is_decoded_plainly_with_any_policy(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.tokenizer.encode(PROMPTS[2])
    policy = tiny.policy(shape=Shape(4, 4))
    expected = decode(tiny, prompt, None, plain=True, num_tokens=16, ignore_eos=True)

    def forward(meta_NM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a forward of the draft")

    monkeypatch.setattr(tiny.engine.draft, "forward", forward)
    config = GenerateConfig(max_new_tokens=16, ignore_eos=True, plain=True)
    results = list(tiny.engine.generate(prompt, policy, config))
    assert [token for result in results for token in result.tokens] == expected
    assert {result.shape for result in results} == {PLAIN}


def test_a_plain_run_has_no_guard_whatever_its_policy(tiny: LoadedPair) -> None:
    prompt = tiny.tokenizer.encode(PROMPTS[2])
    for plain in (False, True):
        config = GenerateConfig(max_new_tokens=4, plain=plain)
        run = Run(tiny, prompt, config, policy=tiny.policy()).complete()
        assert run.to_json()["guard"] is not plain


@pytest.mark.parametrize("plain", (True, False))
def test_a_replaced_generation_raises_an_error_and_the_new_one_continues(
    tiny: LoadedPair, plain: bool
) -> None:
    expected = decode(tiny, PROMPTS[1], Shape(4, 4), plain=plain, ignore_eos=True)
    config = GenerateConfig(max_new_tokens=64, ignore_eos=True, plain=plain)
    policy = tiny.policy(shape=Shape(4, 4))
    first, second = (
        tiny.engine.generate(tiny.tokenizer.encode(prompt), policy, config) for prompt in PROMPTS[:2]
    )
    next(first)
    written = list(next(second).tokens)
    with pytest.raises(YggError, match="another generation has begun on this engine"):
        next(first)
    assert written + [token for result in second for token in result.tokens] == expected


@pytest.mark.parametrize(
    ("shape", "complaint"),
    (
        (Shape(16, 4), "width: 16 is not allowed; it must be from 1 to 4"),
        (Shape(1, 20), "depth: 20 is not allowed; it must be from 0 to 4"),
        (Shape(1, 1, levels=(((0, 4),),)), "width: 5 is not allowed"),
    ),
)
def test_a_shape_that_was_not_compiled_is_refused(tiny: LoadedPair, shape: Shape, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny.policy(shape=shape)


def test_one_node_a_step_is_a_chain(tiny: LoadedPair) -> None:
    # a draft as poor as this one prefers a sibling at some step
    for last in range(20, 40):
        row = Row(0, DecodeState([*range(10, 20), last]))
        choice = Choice((Shape(1, 4),), (UNCALIBRATED.calibration,), VERIFY_ALL)
        [drafted] = draft_rows(tiny.engine.draft, [row], choice, vocab=tiny_pair.VOCAB)
        assert drafted.tree.parent_N.tolist() == [-1, 0, 1, 2, 3]


def test_a_static_tree_may_be_wider_than_a_node_has_children(tiny: LoadedPair) -> None:
    shape = Shape(
        8, 2, levels=(((0, 0), (0, 1)), tuple((parent, rank) for parent in (1, 2) for rank in range(4)))
    )
    assert decode(tiny, PROMPTS[0], shape, num_tokens=12) == decode(
        tiny, PROMPTS[0], None, plain=True, num_tokens=12
    )


def test_speculation_is_accepted_and_rejected_in_these_tests(tiny: LoadedPair) -> None:
    """Without this, the equalities above would prove little."""
    config = GenerateConfig(max_new_tokens=64, ignore_eos=True)
    results = [
        r
        for prompt in PROMPTS
        for r in tiny.engine.generate(
            tiny.tokenizer.encode(prompt), tiny.policy(shape=Shape(4, 4, 16)), config
        )
    ]
    accepted = [result.accepted for result in results]
    assert 0 in accepted
    assert max(accepted) == 4
    # a path that is not the first chain: KV has to move
    assert any(result.path not in (list(range(len(result.path))),) for result in results)


@pytest.mark.parametrize("seed", range(4))
def test_same_seed_same_tokens_with_and_without_speculation(tiny: LoadedPair, seed: int) -> None:
    sampling = replace(SAMPLED, seed=seed)
    plain = decode(tiny, PROMPTS[seed], None, plain=True, sampling=sampling)
    for shape in (Shape(1, 4), Shape(4, 4), None):
        assert decode(tiny, PROMPTS[seed], shape, sampling=sampling) == plain, f"shape {shape}"


def test_another_seed_writes_another_text(tiny: LoadedPair) -> None:
    texts = {
        tuple(
            decode(
                tiny, PROMPTS[0], None, sampling=SamplingConfig(temperature=1.0, seed=seed), ignore_eos=True
            )
        )
        for seed in range(4)
    }
    assert len(texts) == 4


def test_the_thread_count_changes_no_token(tiny: LoadedPair) -> None:
    one = decode(tiny, PROMPTS[0], Shape(4, 4, 16), num_tokens=16, sampling=SAMPLED)
    num_threads = get_num_threads()
    try:
        set_num_threads(2)
        assert decode(tiny, PROMPTS[0], Shape(4, 4, 16), num_tokens=16, sampling=SAMPLED) == one
    finally:
        set_num_threads(num_threads)


def test_shapes_may_change_at_every_step(tiny: LoadedPair, engine: Engine) -> None:
    """Also to plain steps, during which the draft lags and has to catch up."""
    sequence = [
        Shape(4, 4),
        *[Shape(1, 0, 1)] * 5,
        Shape(1, 2),
        Shape(4, 1),
        *[Shape(1, 0, 1)] * 40,
        Shape(4, 3),
        Shape(1, 4),
    ]
    expected = decode(tiny, PROMPTS[0], None, plain=True, num_tokens=150, ignore_eos=True)
    state = DecodeState(tiny.tokenizer.encode(PROMPTS[0]))
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
    prefill(engine.target, state.tokens[:-1])
    while len(state.emitted) < 150:
        for shape in sequence:
            engine.step(state, tiny.policy(shape=shape))
            if len(state.emitted) >= 150:
                break
    assert list(state.emitted)[:150] == expected


@pytest.fixture(scope="module", params=("qwen3", "gptneox"))
def other(request: pytest.FixtureRequest, ygg_home: Path, kernels: None) -> LoadedPair:
    """A Qwen3 pair in bfloat16 with compressed weights, and a GPT-NeoX pair in float32, both random.

    Each has the smallest menu.
    """
    architecture = request.param
    folder = ygg_home / "models" / request.param
    folders = str(folder / "target"), str(folder / "draft")
    if not (folder / "draft" / "model.safetensors").exists():
        folders = tiny_pair.save_random_pair(folder, architecture)
    compiled(
        ygg_home,
        architecture,
        folders,
        COMPRESSED if architecture == "qwen3" else replace(SMALLEST, dtype="float32"),
    )
    return load_pair(architecture)


def test_other_architectures_speculative_equals_plain_in_bf16_too(other: LoadedPair) -> None:
    rates = []
    for prompt in PROMPTS:
        plain = decode(other, prompt, None, plain=True, ignore_eos=True)
        for shape in (Shape(2, 3, 4), Shape(2, 1), None):
            assert decode(other, prompt, shape, ignore_eos=True) == plain, f"shape {shape}"
        sampled = decode(other, prompt, None, plain=True, ignore_eos=True, sampling=SAMPLED)
        assert decode(other, prompt, Shape(2, 3, 4), ignore_eos=True, sampling=SAMPLED) == sampled
        config = GenerateConfig(max_new_tokens=64, ignore_eos=True)
        rates += [
            r.accepted
            for r in other.engine.generate(
                other.tokenizer.encode(prompt), other.policy(shape=Shape(2, 3, 4)), config
            )
        ]
    assert 0 in rates
    assert max(rates) > 0


def test_graphs_read_compressed_weights_if_configured(other: LoadedPair) -> None:
    for model in (other.engine.target, other.engine.draft):
        dtypes = {tensor.dtype for name, tensor in model.weights.items() if name.endswith(".packed")}
        assert dtypes == {torch.uint8 if other.bundle.config.compress else torch.float32}


def test_other_architectures_write_what_transformers_writes(other: LoadedPair) -> None:
    """Compares logits and a text in float32; in bfloat16, which rounds differently, only first logits."""
    from transformers import AutoModelForCausalLM

    bundle = other.bundle
    dtype = getattr(torch, bundle.config.dtype)
    model = AutoModelForCausalLM.from_pretrained(bundle.models[0], dtype=dtype).eval()
    tokens = other.tokenizer.encode(PROMPTS[2])[:16]
    other.engine.target.cache.rollback_(0)
    meta_NM = other.engine.target.meta(16)
    pack_chain_(meta_NM, tokens, 0)
    logits_NV, _ = other.engine.target.forward(meta_NM)
    with torch.no_grad():
        expected_NV = model(torch.tensor([tokens])).logits[0]
    scale = expected_NV.float().std().item()
    tolerance = scale * (1e-4 if dtype == torch.float32 else 0.1)
    torch.testing.assert_close(
        logits_NV[: len(tokens)].float(), expected_NV.float(), rtol=0, atol=tolerance
    )
    if dtype == torch.float32:
        inputs = torch.tensor([tokens])
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=32,
            pad_token_id=0,
        )
        assert decode(other, tokens, None, plain=True, num_tokens=32) == out[0, len(tokens) :].tolist()


def test_nothing_compiles_in_the_loop(tiny: LoadedPair) -> None:
    before = compilations()
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in (Shape(4, 4), Shape(1, 3), None):
            decode(tiny, PROMPTS[0], shape, num_tokens=20)
        run = Run(tiny, tiny.tokenizer.encode(PROMPTS[0]), GenerateConfig(max_new_tokens=20)).complete()
    assert compilations() == before
    assert run.to_json()["compilations"] == before


def test_a_compilation_inside_the_loop_raises(tiny: LoadedPair, tmp_path: Path) -> None:
    job = GraphJob(
        "nowhere",
        "nowhere",
        0,
        384,
        "float32",
        "cpu",
        tiny.bundle.kv_target,
        4,
        2,
        str(tmp_path / "tokens_2.pt2"),
    )
    compiled_here = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with no_compilation():
        with pytest.raises(RuntimeError, match=r"fail_on_recompile|recompile"):
            compiled_here(torch.ones(3))
        with pytest.raises(RuntimeError, match="inside the decode loop"):
            compile_graph(torch.nn.Identity(), empty_meta(2, 4), tmp_path / "x.pt2")
        with pytest.raises(RuntimeError, match="inside the decode loop"):
            compile_graphs([job], num_workers=1, on_done=print)
    assert list(tmp_path.iterdir()) == []


def tree_meta(num_tokens: int, max_depth: int, root_pos: int) -> torch.Tensor:
    """A tree with many branches, of `num_tokens` nodes, after `root_pos` committed tokens."""
    tree = TokenTree.root(5, num_tokens, max_depth=max_depth)
    while len(tree) < num_tokens:
        parent = (len(tree) - 1) // 3
        tree.grow(torch.tensor([parent]), torch.tensor([len(tree) + 20]), torch.tensor([-float(len(tree))]))
    meta_NM = empty_meta(num_tokens, max_depth)
    pack_nodes_(meta_NM, tree, 0, num_tokens, root_pos)
    return meta_NM


def test_compiled_equals_eager(tiny: LoadedPair) -> None:
    config = tiny.bundle.config
    prompt = list(range(20, 32))
    for kind, model, kv in (
        ("target", tiny.engine.target, tiny.bundle.kv_target),
        ("draft", tiny.engine.draft, tiny.bundle.kv_draft),
    ):
        loaded = load_model(tiny.bundle.models[kind == "draft"], dtype=torch.float32)
        pack_linears_(loaded)
        cache = KVCache(kv, dtype=torch.float32, device="cpu")
        eager = (
            TargetForward(loaded, cache, 384)
            if kind == "target"
            else DraftForward(loaded, cache, 384, config.num_candidates)
        )
        model.cache.rollback_(0)
        chain_NM = model.meta(len(prompt))
        pack_chain_(chain_NM, prompt, 0)
        tree_NM = tree_meta(4, config.path_depth, len(prompt))
        for meta_NM, count in ((chain_NM, len(prompt)), (tree_NM, 4)):
            with torch.no_grad():
                expected = eager(meta_NM)
            for ours, theirs in zip(model.forward(meta_NM), expected, strict=True):
                torch.testing.assert_close(ours[:count], theirs[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", ("follow", "commit_row_", "verify_rows", "draft_rows"))
def test_interrupted_step_leaves_committed_history(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    expected = decode(tiny, PROMPTS[0], None, plain=True, num_tokens=48, ignore_eos=True)
    engine = engine_by_stages(tiny)
    state = DecodeState(tiny.tokenizer.encode(PROMPTS[0]))
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    policy = tiny.policy(shape=Shape(4, 4, 16))
    for _ in range(3):
        engine.step(state, policy)
    history = list(state.tokens)

    original = getattr(rows_module, stage)

    def power_cut(*args: Any, **kwargs: Any) -> Any:
        if stage in ("verify_rows", "draft_rows"):
            original(*args, **kwargs)  # its KV is written, its result is lost
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rows_module, stage, power_cut)
        with pytest.raises(KeyboardInterrupt):
            engine.step(state, policy)
    assert state.tokens == history
    while len(state.emitted) < 48:
        engine.step(state, policy)
    assert list(state.emitted)[:48] == expected


@pytest.mark.parametrize("which", ("target", "draft"))
def test_commit_interrupted_between_the_models_leaves_committed_history(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """After the KV of one model, or of both, has moved."""
    expected = decode(tiny, PROMPTS[0], None, plain=True, num_tokens=48, ignore_eos=True)
    engine = engine_by_stages(tiny)
    state = DecodeState(tiny.tokenizer.encode(PROMPTS[0]))
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    policy = tiny.policy(shape=Shape(4, 4, 16))
    engine.step(state, policy)
    history = list(state.tokens)
    keep_ = KVCache.keep_
    cut_cache = getattr(engine, which).cache

    def power_cut(self: KVCache, row: int, start: int, path: Sequence[int]) -> None:
        keep_(self, row, start, path)
        if self is cut_cache:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(KVCache, "keep_", power_cut)
        with pytest.raises(KeyboardInterrupt):
            engine.step(state, policy)
    assert state.tokens == history
    while len(state.emitted) < 48:
        engine.step(state, policy)
    assert list(state.emitted)[:48] == expected


@pytest.mark.parametrize("moment", ("before", "after"))
@pytest.mark.parametrize("which", ("target", "draft"))
def test_an_interrupt_before_the_caches_know_the_new_text_loses_no_token(
    tiny: LoadedPair, engine: Engine, monkeypatch: pytest.MonkeyPatch, which: str, moment: str
) -> None:
    """The text is written first; the next step runs again what a cache does not know."""
    expected = decode(tiny, PROMPTS[0], None, plain=True, num_tokens=48, ignore_eos=True)
    state = DecodeState(tiny.tokenizer.encode(PROMPTS[0]))
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    policy = tiny.policy(shape=Shape(4, 4, 16))
    kept_ = KVCache.kept_
    cut_cache = getattr(engine, which).cache

    def power_cut(self: KVCache, length: int) -> None:
        if self is cut_cache and moment == "before":
            raise KeyboardInterrupt
        kept_(self, length)
        if self is cut_cache:
            raise KeyboardInterrupt

    while len(state.emitted) < 48:
        with monkeypatch.context() as patched:
            patched.setattr(KVCache, "kept_", power_cut)
            before = len(state.tokens)
            with pytest.raises(KeyboardInterrupt):
                engine.step(state, policy)
            assert len(state.tokens) > before
        engine.step(state, policy)
    assert list(state.emitted)[:48] == expected


def test_logits_that_are_not_finite_lose_only_the_step(tiny: LoadedPair, engine: Engine) -> None:
    state = DecodeState(tiny.tokenizer.encode(PROMPTS[0]))
    history = list(state.tokens)
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    values = engine.target.cache.storage_PL2GSF
    kept = values.clone()
    values[:, :, 1] = float("nan")
    try:
        with pytest.raises(YggError, match="not finite"):
            engine.step(state, tiny.policy(shape=Shape(4, 2)))
    finally:
        values.copy_(kept)
    assert state.tokens == history


def test_end_of_text_ends_the_text_and_is_its_last_token(tiny: LoadedPair) -> None:
    free = decode(tiny, PROMPTS[0], Shape(4, 4, 16), num_tokens=120, ignore_eos=True)
    end = free[40]  # any emitted token can serve as the end of text
    first = free.index(end) + 1
    engine = Engine(
        tiny.engine.target, tiny.engine.draft, max_context=tiny.bundle.max_context, eos_tokens=(end,)
    )
    pair = replace(tiny, engine=engine)
    for shape, plain in ((Shape(4, 4, 16), False), (Shape(1, 4), False), (None, True)):
        assert decode(pair, PROMPTS[0], shape, plain=plain, num_tokens=120) == free[:first]


@pytest.mark.parametrize("num_tokens", (1, 2, 3, 5, 17))
def test_never_more_tokens_than_requested(tiny: LoadedPair, num_tokens: int) -> None:
    free = decode(tiny, PROMPTS[0], None, plain=True, num_tokens=20, ignore_eos=True)
    assert (
        decode(tiny, PROMPTS[0], Shape(4, 4, 16), num_tokens=num_tokens, ignore_eos=True)
        == free[:num_tokens]
    )


def test_the_context_can_be_filled_completely(tiny: LoadedPair) -> None:
    context = tiny.bundle.max_context
    prompt = (tiny.tokenizer.encode(" ".join(tiny_pair.stories(8))))[: context - 10]
    expected = decode(tiny, prompt, None, plain=True, num_tokens=10, ignore_eos=True)
    assert len(expected) == 10
    assert decode(tiny, prompt, Shape(4, 4, 16), num_tokens=10, ignore_eos=True) == expected
    assert (
        len(decode(tiny, prompt[:1], Shape(4, 4), num_tokens=context - 1, ignore_eos=True)) == context - 1
    )


def test_requests_that_do_not_fit_are_refused(tiny: LoadedPair) -> None:
    context = tiny.bundle.max_context
    with pytest.raises(ConfigError, match="max_new_tokens: 247 .*at most 246"):
        decode(tiny, [1] * 10, None, num_tokens=247)
    with pytest.raises(ConfigError, match=f"prompt: '{context} tokens' .*shorter than the context"):
        decode(tiny, [1] * context, None, num_tokens=1)
    with pytest.raises(ConfigError, match="prompt: '' .*at least one token"):
        decode(tiny, [], None, num_tokens=1)
    assert check_request(250, GenerateConfig(), tiny.engine.max_context) == 6


def test_the_error_for_a_tree_wider_than_the_menu_names_the_menu(tiny: LoadedPair) -> None:
    with pytest.raises(
        ShapeNotCompiled, match=r"no compiled graph takes 33 tokens; the menu is \[2, 4, 8, 16, 32\]"
    ):
        tiny.engine.target.meta(33)


def test_long_prompts_are_prefilled_in_chunks_with_the_same_result(
    tiny: LoadedPair, engine: Engine
) -> None:
    prompt = tiny.tokenizer.encode(" ".join(tiny_pair.stories(8)))[:101]
    chunked = decode(tiny, prompt, None, plain=True, num_tokens=20, ignore_eos=True)
    state = DecodeState(prompt[:1])
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
    for token in prompt[1:]:  # the same prompt, token after token
        engine.step(state, plain_policy())
        state.tokens[-1:] = [token]
    state.prompt_len = len(prompt)
    while len(state.emitted) < 20:
        engine.step(state, plain_policy())
    assert list(state.emitted) == chunked


def test_a_useless_draft_changes_no_token_and_the_guard_stops_it(tiny_bundle: Bundle) -> None:
    """The draft's embedding is shuffled after calibration; in this profile a plain step takes no time."""
    pair = load_pair(tiny_bundle.name)
    embedding = next(
        tensor for name, tensor in pair.engine.draft.weights.items() if name.endswith("embed_tokens.weight")
    )
    embedding.copy_(embedding[torch.randperm(len(embedding))])
    free_when_plain = LatencyModel(
        Curve((0,), (4,), ((1.0,),)), Curve((0,), (1, 64), ((1e-6, 1.0),)), 0.0, 0.0, 0.0
    )
    inner = FixedShape(Shape(4, 4, 8), pair.acceptance.nearest(0.0), pair.latency, (4, 8, 16))
    prompt = pair.tokenizer.encode("Once upon a time")
    results = list(
        pair.engine.generate(
            prompt, Guard(inner, free_when_plain), GenerateConfig(max_new_tokens=96, ignore_eos=True)
        )
    )
    assert [token for result in results for token in result.tokens] == decode(
        pair, prompt, None, plain=True, num_tokens=96, ignore_eos=True
    )
    shapes = {result.shape for result in results}
    assert shapes == {PLAIN, inner.shape}
