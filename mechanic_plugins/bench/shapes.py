"""The lists of tensors that are measured."""

from __future__ import annotations

__all__ = ["SIZES", "gpt2_shapes", "lora_shapes"]

Shapes = list[tuple[int, ...]]

SIZES = {
    "tiny": (64, 2),
    "10M": (256, 8),
    "124M": (768, 12),
    "355M": (1024, 24),
    "774M": (1280, 36),
    "1.56B": (1600, 48),
}
"""Width and layers."""


def gpt2_shapes(width: int, layers: int, *, vocabulary: int = 50257) -> Shapes:
    """The parameters of a GPT-2 of this size, in its order."""
    layer: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (1024, width), *(layer * layers), (width,), (width,)]


def lora_shapes(width: int = 4096, inner: int = 11008, layers: int = 32, rank: int = 8) -> Shapes:
    """LoRA on every linear layer of a Llama of 7B parameters: hundreds of small tensors."""
    linear = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    return [shape for outputs, inputs in linear * layers for shape in ((rank, inputs), (outputs, rank))]
