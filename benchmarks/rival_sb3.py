"""One run of stable-baselines3's PPO on CartPole-v1; prints one JSON object. See ppo_cartpole.py, which calls it."""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

ZOO = {
    "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0,
    "learning_rate": lambda left: left * 1e-3, "clip_range": lambda left: left * 0.2,
}  # fmt: skip


class Curve(BaseCallback):
    """Mean of the last 100 episodes at the end of every rollout."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        recent = [episode["r"] for episode in self.model.ep_info_buffer]
        if recent:
            self.rows.append([self.num_timesteps, sum(recent) / len(recent)])


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--setting", choices=["defaults", "zoo"], required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--episodes", type=int, default=100)
chosen = parser.parse_args()
torch.set_num_threads(1)
env = make_vec_env("CartPole-v1", n_envs=8, seed=chosen.seed)
model = PPO("MlpPolicy", env, seed=chosen.seed, device="cpu", **(ZOO if chosen.setting == "zoo" else {}))
curve = Curve()
began, cpu = time.perf_counter(), time.process_time()
model.learn(chosen.steps, callback=curve)
seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
final, _ = evaluate_policy(
    model, make_vec_env("CartPole-v1", n_envs=8, seed=1000 + chosen.seed), n_eval_episodes=chosen.episodes
)
print(json.dumps({
    "env_steps": model.num_timesteps, "seconds": seconds, "cpu_seconds": cpu_seconds, "final": final, "curve": curve.rows,
    "versions": {name: version(name) for name in ("stable-baselines3", "torch", "gymnasium")}, "threads": 1,
}))  # fmt: skip
