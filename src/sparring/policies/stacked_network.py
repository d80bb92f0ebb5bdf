"""The network of stacked small policies with its gradient written out: two towers of hidden layers, and their heads.

An update of small policies is thousands of small products, and what torch spends between them (a node for every one,
weights copied out of the parameter row and gradients back into it) is more than the products. Here the whole network is
one node of torch's graph: products read their weights where they lie in the row and write their gradients there.
Distributions and losses stay torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Layer = tuple[Tensor, Tensor]
"""Weight (A, in, out) and bias (A, 1, out)."""


_MINUS_ONE = torch.tensor(-1.0, dtype=torch.float64)  # of no dimension: it takes the dtype of what it is added to


class Parameters(Protocol):
    """Where weights lie in rows of parameters."""

    def named(self, parameters: Tensor) -> dict[str, Tensor]: ...

    def towers(self, weights: Mapping[str, Tensor]) -> tuple[list[Layer], list[Layer]]: ...

    @property
    def activation(self) -> str: ...


def stacked_network(
    parameters: Tensor, policies: Parameters, observations: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What actors and critics say, differentiable once, by the parameters alone.

    Args:
        parameters: Shape (A, P).
        policies: Says where the weights lie.
        observations: Shape (A, B, D).
        seen: What the critics see, (A, B, D) or (A, B, S).

    Returns:
        Logits or means (A, F, B), values (A, B), and log-stds (A, 1, K), of size 0 where there are none.
    """
    found: tuple[Tensor, Tensor, Tensor] = _StackedNetwork.apply(parameters, policies, observations, seen)  # type: ignore[no-untyped-call]
    return found


def hidden_layers(layers: Sequence[Layer], x: Tensor, activation: str) -> list[Tensor]:
    """Outputs of the hidden layers, (A, B, H) each, of a tower that sees x."""
    found = []
    for weight, bias in layers:
        if activation == "relu":
            x = torch.baddbmm(bias, x, weight).relu_()
        else:
            # tanh(y) = 2 sigmoid(2 y) - 1: torch's sigmoid costs a quarter of its tanh on a CPU.
            x = torch.baddbmm(bias, x, weight, beta=2.0, alpha=2.0).sigmoid_()
            x = torch.add(_MINUS_ONE, x, alpha=2.0, out=x)
        found.append(x)
    return found


def narrow(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """A layer of few outputs, (A, F, B) from weight (A, F, H) and x (A, B, H): BLAS is five times slower at the usual
    order, forward and backward, when F is 1 or 2."""
    return torch.baddbmm(bias, weight, x.transpose(1, 2))


class _StackedNetwork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameters: Tensor, policies: Parameters, observations: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = policies.named(parameters)
        towers = policies.towers(weights)
        acting = hidden_layers(towers[0], observations, policies.activation)
        judging = hidden_layers(towers[1], seen, policies.activation)
        said = narrow(weights["actor.weight"], weights["actor.bias"], acting[-1])
        values = narrow(weights["critic.weight"], weights["critic.bias"], judging[-1]).squeeze(1)
        log_std = weights["log_std"].clone() if "log_std" in weights else parameters.new_zeros(len(parameters), 1, 0)
        ctx.save_for_backward(parameters, observations, seen, *acting, *judging)
        ctx.policies, ctx.weights, ctx.towers = policies, weights, towers
        return said, values, log_std

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upper: Tensor) -> tuple[Tensor, None, None, None]:
        parameters, observations, seen, *hidden = ctx.saved_tensors
        policies: Parameters = ctx.policies
        gradients = torch.empty_like(parameters)
        into = policies.named(gradients)
        if "log_std" in into:
            into["log_std"].copy_(upper[2])
        depth = len(hidden) // 2
        towers = zip(
            ("actor", "critic"), (upper[0], upper[1].unsqueeze(1)), (observations, seen),
            (hidden[:depth], hidden[depth:]), ctx.towers, policies.towers(into), strict=True,
        )  # fmt: skip
        for head, said, x, own, layers, places in towers:
            into[f"{head}.weight"].copy_(torch.bmm(said, own[-1]))
            into[f"{head}.bias"].copy_(said.sum(2, keepdim=True))
            back = torch.bmm(said.transpose(1, 2), ctx.weights[f"{head}.weight"])
            for layer in range(depth - 1, -1, -1):
                back = _through(back, own[layer], policies.activation)
                below = own[layer - 1] if layer else x
                places[layer][0].copy_(torch.bmm(below.transpose(1, 2), back))
                places[layer][1].copy_(back.sum(1, keepdim=True))
                if layer:
                    back = torch.bmm(back, layers[layer][0].transpose(1, 2))
        return gradients, None, None, None


def _through(back: Tensor, out: Tensor, activation: str) -> Tensor:
    """The gradient before an activation, from that after it and what it put out; in place."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward.grad_input(back, out, 0.0, grad_input=back)  # type: ignore[no-any-return]
    return torch.ops.aten.tanh_backward.grad_input(back, out, grad_input=back)  # type: ignore[no-any-return]
