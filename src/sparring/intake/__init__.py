"""Where trajectories come in: their wire form, files, the paths they continue, the registry that collects them."""
