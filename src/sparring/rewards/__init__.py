"""What a settled turn is worth, from the facts that its environment recorded and nothing else.

``market.outcome`` pays observed effects; ``classic`` is the original's intent-aware rules, exact, for comparison;
``load.load_reward`` finds either, an environment's own, or a user's function by name.
"""
