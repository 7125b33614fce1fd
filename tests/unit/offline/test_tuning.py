"""What tuning reads from a bundle."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from yggdrasil.bundle import Bundle
from yggdrasil.offline.tuning import draft_embedding


def test_the_embedding_of_a_bundle_is_that_of_its_draft(tiny_bundle: Bundle) -> None:
    draft = AutoModelForCausalLM.from_pretrained(tiny_bundle.models[1], dtype=tiny_bundle.dtype)
    expected_VE = draft.get_input_embeddings().weight[: tiny_bundle.vocab]
    assert torch.equal(draft_embedding(tiny_bundle), expected_VE)
