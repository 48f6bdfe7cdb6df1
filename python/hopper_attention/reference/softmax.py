"""Softmax in three passes and in two. x (N, M): each row is a softmax; a row of -inf only gives 0."""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.arrays import algorithm, divide, safe


@algorithm
def safe_softmax(x):
    """y_j = exp(x_j - m) / d with m = max_j x_j and d = sum_j exp(x_j - m): no overflow, whatever x holds.

    Three passes over x, one over y: the maximum, the sum, the quotient.
    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), Algorithm 2.
    """
    maximum = np.full(len(x), -np.inf, x.dtype)
    for j in range(x.shape[1]):
        maximum = np.maximum(maximum, x[:, j])
    maximum = safe(maximum)
    total = np.zeros_like(maximum)
    for j in range(x.shape[1]):
        total = total + np.exp(x[:, j] - maximum)
    y = np.empty_like(x)
    for j in range(x.shape[1]):
        y[:, j] = divide(np.exp(x[:, j] - maximum), total)
    return y


@algorithm
def online_softmax(x):
    """The maximum and the sum in one pass: when the maximum grows, the sum so far is rescaled,

        m_j = max(m_{j-1}, x_j),   d_j = d_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j).

    Two passes over x, one over y.
    Source: Milakov and Gimelshein (2018), Algorithm 3.
    """
    maximum = np.full(len(x), -np.inf, x.dtype)
    total = np.zeros(len(x), x.dtype)
    for j in range(x.shape[1]):
        previous, maximum = maximum, np.maximum(maximum, x[:, j])
        total = total * np.exp(previous - safe(maximum)) + np.exp(x[:, j] - safe(maximum))
    y = np.empty_like(x)
    for j in range(x.shape[1]):
        y[:, j] = divide(np.exp(x[:, j] - safe(maximum)), total)
    return y
