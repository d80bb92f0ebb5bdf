"""Writes from_sb3.npz: GAE, and weights after PPO.train(), as stable-baselines3 computes them.

Run in an environment of its own (pip install stable-baselines3==2.9.2): python tests/learning/rivals/from_sb3.py
"""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import configure

STEPS, ENVS, GAMMA, LAM = 24, 3, 0.97, 0.9


class Nothing(gym.Env):
    observation_space = gym.spaces.Box(-10, 10, (4,), np.float32)

    def __init__(self, continuous):
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32) if continuous else gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, False, {}


def one(continuous: bool, noise: float = 0.3, **settings) -> dict[str, np.ndarray]:
    torch.manual_seed(1)
    rng = np.random.default_rng(2)
    model = PPO(
        "MlpPolicy",
        Nothing(continuous),
        n_steps=STEPS * ENVS,
        gamma=GAMMA,
        gae_lambda=LAM,
        policy_kwargs={"net_arch": [8, 8]},
        device="cpu",
        seed=1,
        **settings,
    )
    for parameter in model.policy.parameters():  # small random weights, log_std too
        parameter.data += 0.1 * torch.randn_like(parameter)

    buffer = RolloutBuffer(
        STEPS, model.observation_space, model.action_space, device="cpu", gamma=GAMMA, gae_lambda=LAM, n_envs=ENVS
    )
    terminated = rng.random((STEPS, ENVS)) < 0.1
    truncated = rng.random((STEPS, ENVS)) < 0.1
    observations = rng.normal(size=(STEPS + 1, ENVS, 4)).astype(np.float32)
    finals = rng.normal(size=(STEPS, ENVS, 4)).astype(np.float32)
    rewards = rng.normal(size=(STEPS, ENVS)).astype(np.float32)
    out = {}
    for name, value in model.policy.state_dict().items():
        out[f"before/{name}"] = value.numpy().copy()
    starts = np.ones(ENVS, bool)
    actions, log_probs, values = [], [], []
    for t in range(STEPS):
        with torch.no_grad():
            action, value, log_prob = model.policy(torch.as_tensor(observations[t]))
            # A behaviour policy that is not quite the learner.
            log_prob = log_prob + noise * torch.as_tensor(rng.normal(size=ENVS).astype(np.float32))
            after = model.policy.predict_values(torch.as_tensor(finals[t])).squeeze(1).numpy()
        adjusted = rewards[t] + np.where(truncated[t] & ~terminated[t], GAMMA * after, 0.0).astype(np.float32)
        kept = action.numpy().reshape(ENVS, -1)
        buffer.add(observations[t], kept, adjusted, starts, value, log_prob)
        starts = terminated[t] | truncated[t]
        actions.append(kept), log_probs.append(log_prob.numpy()), values.append(value.numpy().squeeze(1))
    with torch.no_grad():
        last = model.policy.predict_values(torch.as_tensor(observations[STEPS])).squeeze(1)
    buffer.compute_returns_and_advantage(last, starts)
    out |= {
        "observations": observations,
        "finals": finals,
        "rewards": rewards,
        "terminated": terminated,
        "truncated": truncated,
        "actions": np.stack(actions),
        "log_probs": np.stack(log_probs),
        "values": np.stack(values),
        "last_values": last.numpy(),
        "advantages": buffer.advantages,
        "returns": buffer.returns,
    }
    model.rollout_buffer = buffer
    orders, real = [], np.random.permutation
    np.random.permutation = lambda n: orders.append(real(n)) or orders[-1]
    model._setup_learn(1000)
    model._current_progress_remaining = 1.0
    model._logger = configure(None, [])
    model.train()
    np.random.permutation = real
    out["orders"] = np.stack(orders)
    for name, value in model.policy.state_dict().items():
        out[f"after/{name}"] = value.numpy().copy()
    for name in ("policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction"):
        out[f"logged/{name}"] = np.array(model.logger.name_to_value[f"train/{name}"])
    return out


cases = {
    "discrete": one(False, batch_size=20, n_epochs=3, learning_rate=1e-2, ent_coef=0.01),
    "continuous": one(True, batch_size=24, n_epochs=2, learning_rate=1e-2, ent_coef=0.02, max_grad_norm=0.3),
    "stopped": one(
        False, batch_size=24, n_epochs=6, learning_rate=3e-2, target_kl=0.02, normalize_advantage=False, noise=0.02
    ),
}
np.savez_compressed(
    Path(__file__).with_suffix(".npz"),
    **{f"{case}/{name}": v for case, own in cases.items() for name, v in own.items()},
)
for case, own in cases.items():
    print(case, {n: v for n, v in own.items() if n.startswith("logged")}, len(own["orders"]))
