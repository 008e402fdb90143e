"""The Hadamard transform of queries and keys, for keys in 8 bits.

A product of a query and a key is the same after an orthonormal transform of both. A large number of a key is spread
over all of its numbers, so that a scale for the largest of them loses less of the others (Ashkboos et al., 2024,
arXiv:2404.00456).
"""

import torch
from torch import Tensor


def transform_heads(heads: Tensor) -> Tensor:
    """Multiply heads [..., D] with an orthonormal Hadamard matrix (Sylvester's) of the largest power of two B that
    divides D. A block is B / 2 dimensions of the first half of a head and those of the second half that rotate with
    them. It is its own inverse. Returns float32.
    """
    head_dim = heads.shape[-1]
    size = head_dim & -head_dim
    numbers = heads.float().reshape(*heads.shape[:-1], 2, head_dim // size, size // 2).transpose(-3, -2)
    # One dimension of length 2 for each factor of the size: a butterfly joins the two parts of one of them.
    shape = numbers.shape
    step = 1
    while step < size:
        pairs = numbers.reshape(-1, size // (2 * step), 2, step)
        numbers = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        step *= 2
    factor: float = size**-0.5
    return (numbers.reshape(shape) * factor).transpose(-3, -2).reshape(heads.shape)


def hadamard_reference(head_dim: int) -> Tensor:
    """The matrix of `transform_heads`, [D, D] float64, from its definition: in a block, the sign of element (i, j) is
    the parity of the bits that i and j have in common."""
    size = head_dim & -head_dim
    half, dims = head_dim // 2, torch.arange(head_dim)
    block = dims % half // (size // 2)
    index = dims // half * (size // 2) + dims % half % (size // 2)
    common = index[:, None] & index[None]
    parity = torch.zeros_like(common)
    for bit in range(size.bit_length()):
        parity ^= (common >> bit) & 1
    factor: float = size**-0.5
    return torch.where(block[:, None] == block[None], (1.0 - 2.0 * parity.double()) * factor, 0.0)
