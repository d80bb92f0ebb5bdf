"""Writes from_torchrl.npz: advantages by TorchRL, and a step by CleanRL's formulas, all in float64.

Run in an environment of its own (pip install torchrl==0.14.1): python tests/learning/rivals/from_torchrl.py
CleanRL is no package; its loss (clipped values, 1/2, unbiased deviation) is restated here from its documentation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.distributions import Categorical
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate

torch.set_default_dtype(torch.float64)  # else gamma and lambda are rounded to float32
rng = np.random.default_rng(0)
T, R = 30, 5
out: dict[str, np.ndarray] = {
    "rewards": rng.normal(size=(T, R)), "values": rng.normal(size=(T, R)), "next_values": rng.normal(size=(T, R)),
    "terminated": rng.random((T, R)) < 0.15, "log_pi": -rng.exponential(size=(T, R)),
    "log_mu": -rng.exponential(size=(T, R)),
}  # fmt: skip
out["ended"] = out["terminated"] | (rng.random((T, R)) < 0.15)
inside = ~out["ended"][:-1]
out["next_values"][:-1][inside] = out["values"][1:][inside]


def columns(name: str) -> torch.Tensor:
    return torch.as_tensor(out[name].T[..., None])  # (R, T, 1)


for gamma, lam in ((0.99, 0.95), (0.9, 1.0), (1.0, 0.5)):
    advantages, _ = generalized_advantage_estimate(
        gamma, lam, columns("values"), columns("next_values"), columns("rewards"), columns("ended"),
        columns("terminated"),
    )  # fmt: skip
    out[f"gae/{gamma}/{lam}"] = advantages[..., 0].numpy().T
for cap in (1.0, 2.0):
    advantages, targets = vtrace_advantage_estimate(
        0.95, columns("log_pi"), columns("log_mu"), columns("values"), columns("next_values"), columns("rewards"),
        columns("ended"), columns("terminated"), rho_thresh=cap, c_thresh=1.0,
    )  # fmt: skip
    out[f"vtrace/{cap}/advantages"] = advantages[..., 0].numpy().T
    out[f"vtrace/{cap}/targets"] = targets[..., 0].numpy().T

# CleanRL's update on one minibatch, with a network of its own shape: two towers of one hidden layer.
torch.manual_seed(0)
B, D, H, F = 40, 3, 6, 4
shapes = {"aw": (H, D), "ab": (H,), "cw": (H, D), "cb": (H,), "al": (F, H), "alb": (F,), "cl": (1, H), "clb": (1,)}
weights = {n: (0.5 * torch.randn(s, dtype=torch.float64)).requires_grad_() for n, s in shapes.items()}
x = torch.as_tensor(rng.normal(size=(B, D)))
actions = torch.as_tensor(rng.integers(F, size=B))
old_log_probs = torch.as_tensor(np.log(rng.uniform(0.1, 0.9, B)))
advantages, returns, old_values = (torch.as_tensor(rng.normal(size=B)) for _ in range(3))
data = {"x": x, "actions": actions, "old_log_probs": old_log_probs, "advantages": advantages, "returns": returns}
data["old_values"] = old_values
out |= {f"cleanrl/{n}": t.numpy() for n, t in data.items()} | {
    f"cleanrl/before/{n}": w.detach().numpy().copy() for n, w in weights.items()
}
optimizer = torch.optim.Adam(weights.values(), lr=1e-2, eps=1e-5)
for step in range(3):
    logits = torch.tanh(x @ weights["aw"].T + weights["ab"]) @ weights["al"].T + weights["alb"]
    values = (torch.tanh(x @ weights["cw"].T + weights["cb"]) @ weights["cl"].T + weights["clb"]).squeeze(1)
    policy = Categorical(logits=logits)
    log_ratio = policy.log_prob(actions) - old_log_probs
    ratio = log_ratio.exp()
    normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = torch.max(-normal * ratio, -normal * ratio.clamp(0.8, 1.2)).mean()
    clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
    value_loss = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    loss = policy_loss - 0.01 * policy.entropy().mean() + 0.5 * value_loss
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
    optimizer.step()
    figures = [policy_loss, value_loss, policy.entropy().mean(), ((ratio - 1) - log_ratio).mean(), norm]
    out[f"cleanrl/figures/{step}"] = np.array([float(f) for f in figures])
out |= {f"cleanrl/after/{n}": w.detach().numpy().copy() for n, w in weights.items()}
np.savez_compressed(Path(__file__).with_suffix(".npz"), **out)
